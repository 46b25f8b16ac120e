// Numbers as people read them. What is not known is a dash, never a zero.

export const unknown = "–";

const known = (v) => typeof v === "number" && Number.isFinite(v);

// milliseconds shows a time that is given in them, with three digits.
export function milliseconds(v) {
  if (!known(v)) return unknown;
  const size = Math.abs(v);
  if (size >= 99950) return `${round(v / 1000, 0)} s`;
  if (size >= 9995) return `${round(v / 1000, 1)} s`;
  if (size >= 999.5) return `${round(v / 1000, 2)} s`;
  if (size >= 99.95) return `${round(v, 0)} ms`;
  if (size >= 9.995) return `${round(v, 1)} ms`;
  return v === 0 ? "0 ms" : `${round(v, 2)} ms`;
}

// signed is milliseconds with its sign.
export function signed(v) {
  if (!known(v)) return unknown;
  const text = milliseconds(Math.abs(v));
  return v > 0 ? `+${text}` : v < 0 ? `−${text}` : text;
}

// count shows a number of things.
export function count(v) {
  if (!known(v)) return unknown;
  const size = Math.abs(v);
  if (size >= 99950000) return `${round(v / 1e6, 0)}M`;
  if (size >= 999500) return `${round(v / 1e6, 1)}M`;
  if (size >= 99950) return `${round(v / 1000, 0)}k`;
  if (size >= 9999.5) return `${round(v / 1000, 1)}k`;
  return whole.format(v);
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// rate shows how many a second.
export function rate(v) {
  if (!known(v)) return unknown;
  const size = Math.abs(v);
  return size >= 0.05 && size < 9.95 ? round(v, 1) : count(v);
}

// percent shows a part of 1.
export function percent(v) {
  if (!known(v)) return unknown;
  const p = v * 100;
  return `${p > 0 && p < 0.95 ? round(p, 1) : round(p, 0)} %`;
}

export function bytes(v) {
  if (!known(v)) return unknown;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (v < 1000 || unit === "GiB") return `${unit === "B" || v >= 100 ? round(v, 0) : round(v, 1)} ${unit}`;
    v /= 1024;
  }
}

// age shows how long something is, or was, in seconds.
export function age(seconds) {
  if (!known(seconds)) return unknown;
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

// clock is the time of day of a moment that JSON gives, to the second.
export function clock(text) {
  const at = new Date(text);
  return Number.isNaN(at.getTime()) ? unknown : at.toLocaleTimeString("en-GB");
}

// round keeps so many digits after the point, and shows no negative zero.
function round(v, digits) {
  const text = v.toFixed(digits);
  return Number(text) === 0 ? Math.abs(0).toFixed(digits) : text;
}
