package template

import (
	"fmt"
	"strings"
	"time"
)

// strftime writes a time as Python's datetime.strftime does in the C locale. A
// datetime.now() knows no zone.
func strftime(t time.Time, format string) (string, error) {
	if strings.Contains(format, "\x00") {
		return "", unfollowed("a time format with a NUL")
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		i++
		verb := byte(0)
		padding := byte(0)
		if i < len(format) && format[i] == '-' {
			padding = '-'
			i++
		}
		if i < len(format) {
			verb = format[i]
		}
		number := func(n, width int, pad byte) {
			text := fmt.Sprint(n)
			if padding != '-' {
				text = strings.Repeat(string(rune(pad)), max(width-len(text), 0)) + text
			}
			b.WriteString(text)
		}
		hour := (t.Hour()+11)%12 + 1
		week := int(t.Weekday())
		if padding == '-' && strings.IndexByte("dmHIMSjyeklUW", verb) < 0 {
			return "", unfollowed("the time format %%-%c", verb)
		}
		switch verb {
		case '%':
			b.WriteByte('%')
		case 'Y':
			fmt.Fprintf(&b, "%d", t.Year())
		case 'y':
			number(t.Year()%100, 2, '0')
		case 'm':
			number(int(t.Month()), 2, '0')
		case 'd':
			number(t.Day(), 2, '0')
		case 'e':
			number(t.Day(), 2, ' ')
		case 'H':
			number(t.Hour(), 2, '0')
		case 'k':
			number(t.Hour(), 2, ' ')
		case 'I':
			number(hour, 2, '0')
		case 'l':
			number(hour, 2, ' ')
		case 'M':
			number(t.Minute(), 2, '0')
		case 'S':
			number(t.Second(), 2, '0')
		case 'j':
			number(t.YearDay(), 3, '0')
		case 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		case 'p':
			b.WriteString(t.Format("PM"))
		case 'P':
			b.WriteString(t.Format("pm"))
		case 'B':
			b.WriteString(t.Format("January"))
		case 'b', 'h':
			b.WriteString(t.Format("Jan"))
		case 'A':
			b.WriteString(t.Format("Monday"))
		case 'a':
			b.WriteString(t.Format("Mon"))
		case 'w':
			fmt.Fprintf(&b, "%d", week)
		case 'u':
			fmt.Fprintf(&b, "%d", (week+6)%7+1)
		case 'U':
			number((t.YearDay()+6-week)/7, 2, '0')
		case 'W':
			number((t.YearDay()+6-(week+6)%7)/7, 2, '0')
		case 'V':
			_, n := t.ISOWeek()
			fmt.Fprintf(&b, "%02d", n)
		case 'G':
			year, _ := t.ISOWeek()
			fmt.Fprintf(&b, "%d", year)
		case 'F':
			b.WriteString(t.Format("2006-01-02"))
		case 'D', 'x':
			b.WriteString(t.Format("01/02/06"))
		case 'T', 'X':
			b.WriteString(t.Format("15:04:05"))
		case 'R':
			b.WriteString(t.Format("15:04"))
		case 'r':
			b.WriteString(t.Format("03:04:05 PM"))
		case 'c':
			b.WriteString(t.Format("Mon Jan _2 15:04:05 2006"))
		case 'n':
			b.WriteByte('\n')
		case 't':
			b.WriteByte('\t')
		case 'z', 'Z':
		default:
			return "", unfollowed("the time format %%%c", verb)
		}
	}
	return b.String(), nil
}
