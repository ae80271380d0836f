// Formats numbers for people.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

/** Bytes, in powers of ten. */
export function size(bytes) {
  let unit = 0;
  let value = bytes;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toPrecision(2)} ${UNITS[unit]}`;
}

/** Seconds, in the largest unit that fits. */
export function span(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} days`;
}

export function rate(perSecond) {
  if (perSecond === null) return "–";
  return perSecond >= 100 ? String(Math.round(perSecond)) : perSecond.toFixed(perSecond ? 1 : 0);
}

export const count = (number, word) => `${number.toLocaleString("en")} ${word}`;
