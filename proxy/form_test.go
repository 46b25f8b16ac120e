package proxy

import (
	"bytes"
	"mime/multipart"
	"strings"
	"testing"
)

func TestScanForm(t *testing.T) {
	const kind = `multipart/form-data; boundary=b1`
	f := func(body, want string, stream bool) {
		t.Helper()
		body = strings.ReplaceAll(body, "\n", "\r\n")
		c, err := scanForm([]byte(kind), []byte(body))
		if err != nil {
			t.Errorf("%q: %v", body, err)
			return
		}
		got := "none"
		if c.model == memberString {
			got = string(c.name([]byte(body)))
		}
		if got != want || c.stream != stream {
			t.Errorf("%q: got %q, stream %v; want %q, %v", body, got, c.stream, want, stream)
		}
	}
	part := func(name, value string) string {
		return "--b1\nContent-Disposition: form-data; name=\"" + name + "\"\n\n" + value + "\n"
	}
	f(part("model", "whisper")+"--b1--\n", "whisper", false)
	f(part("file", "RIFF")+part("model", "whisper")+part("stream", "true")+"--b1--", "whisper", true)
	f(part("model", "a")+part("model", "b")+"--b1--\n", "b", false)
	f(part("model", "")+"--b1--\n", "", false)
	f(part("language", "en")+"--b1--\n", "none", false)
	f("a preamble\n"+part("model", "m")+"--b1--\nan epilogue", "m", false)
	f("--b1 \t\ncontent-type: text/plain\nCONTENT-DISPOSITION: form-data; filename=x; name=model\n\nm\n--b1--", "m", false)
	// What looks like a delimiter inside a part but is none.
	f(part("file", "x--b1y\n-b1\n--b")+part("model", "m")+"--b1--", "m", false)
	f("--b1\nContent-Disposition: attachment; name=model\n\nm\n--b1--", "none", false)
	f(strings.Repeat(part("x", "y"), maxParts-1)+part("model", "m")+"--b1--", "m", false)
}

func TestScanFormFailure(t *testing.T) {
	f := func(kind, body string) {
		t.Helper()
		body = strings.ReplaceAll(body, "\n", "\r\n")
		if c, err := scanForm([]byte(kind), []byte(body)); err == nil {
			t.Errorf("%s %q is taken: %+v", kind, body, c)
		}
	}
	f("application/json", "{}")
	f("multipart/form-data", "--b1--")
	f("multipart/mixed; boundary=b1", "--b1--")
	f("", "--b1--")
	f("multipart/form-data; boundary=b1", "")
	f("multipart/form-data; boundary=b1", "--b2--")
	f("multipart/form-data; boundary=b1", "--b1\nContent-Disposition: form-data; name=model\n\nm")
	f("multipart/form-data; boundary=b1", "--b1\nContent-Disposition: form-data; name=model")
	f("multipart/form-data; boundary=b1", "--b1 junk\n\nm\n--b1--")
	f("multipart/form-data; boundary=b1", "--b1")
	f("multipart/form-data; boundary=b1", strings.Repeat("--b1\n\n\n", maxParts+1)+"--b1--")
}

// The scanner finds what the standard library finds.
func FuzzScanForm(f *testing.F) {
	f.Add("whisper", "sound\r\n--", "true")
	f.Add("", "", "")
	f.Fuzz(func(t *testing.T, model, file, stream string) {
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		w.WriteField("stream", stream)
		part, _ := w.CreateFormFile("file", "a.wav")
		part.Write([]byte(file))
		w.WriteField("model", model)
		w.Close()
		c, err := scanForm([]byte(w.FormDataContentType()), b.Bytes())
		if err != nil || c.model != memberString || string(c.name(b.Bytes())) != model {
			t.Fatalf("model %q, file %q: %+v, %v", model, file, c, err)
		}
		form, err := multipart.NewReader(&b, w.Boundary()).ReadForm(1 << 20)
		if err != nil {
			t.Skip("the standard library refuses its own form")
		}
		if got := form.Value["model"]; len(got) != 1 || got[0] != model {
			t.Fatalf("the standard library finds %q", got)
		}
	})
}
