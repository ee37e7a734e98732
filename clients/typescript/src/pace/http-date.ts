/** Dates of HTTP (RFC 9110, 5.6.7), in their three forms. `Date.parse` was rejected: it accepts far more, differently in each engine. */

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const MONTH = MONTHS.join("|");
const TIME = "(\\d{2}):(\\d{2}):(\\d{2})";
const IMF = new RegExp(`^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun), (\\d{2}) (${MONTH}) (\\d{4}) ${TIME} GMT$`);
const RFC850 = new RegExp(`^(?:Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday), (\\d{2})-(${MONTH})-(\\d{2}) ${TIME} GMT$`);
const ASCTIME = new RegExp(`^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (${MONTH}) ((?:\\d| )\\d) ${TIME} (\\d{4})$`);

/** Milliseconds since 1970, or `null`. `nowMs` decides the century of a year with two digits. */
export function parseHttpDate(text: string, nowMs: number): number | null {
  let match = IMF.exec(text);
  if (match !== null) return date(Number(match[3]), match[2], Number(match[1]), match[4], match[5], match[6]);
  match = RFC850.exec(text);
  if (match !== null) {
    let year = 2000 + Number(match[3]);
    if (year > new Date(nowMs).getUTCFullYear() + 50) year -= 100;
    return date(year, match[2], Number(match[1]), match[4], match[5], match[6]);
  }
  match = ASCTIME.exec(text);
  if (match !== null) return date(Number(match[6]), match[1], Number(match[2]), match[3], match[4], match[5]);
  return null;
}

function date(year: number, monthName: string | undefined, day: number, hour: string | undefined, minute: string | undefined, second: string | undefined): number | null {
  const month = MONTHS.indexOf(monthName ?? "");
  const [h, m, s] = [Number(hour), Number(minute), Number(second)];
  if (h > 23 || m > 59 || s > 60) return null;
  const midnight = new Date(0);
  midnight.setUTCFullYear(year, month, day);
  // A day that does not exist becomes one of the next month.
  if (midnight.getUTCMonth() !== month || midnight.getUTCDate() !== day) return null;
  return midnight.getTime() + ((h * 60 + m) * 60 + s) * 1000;
}
