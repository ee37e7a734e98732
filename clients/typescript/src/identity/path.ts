/**
 * Paths and hosts in one spelling, as an upstream would read them. `/login`, `//login`, `/%6Cogin` and `/login/` reach
 * the same handler in most servers; if they were different endpoints here, each would get a fresh limit.
 */

export function pathOfTarget(target: string): string {
  const path = target.split(/[?#]/, 1)[0] ?? "";
  if (path.startsWith("/")) return path;
  const at = path.indexOf("://");
  const rest = at < 0 ? "" : path.slice(at + 3);
  const slash = rest.indexOf("/");
  return slash < 0 ? "/" : rest.slice(slash);
}

export function normalizePath(path: string): string {
  const decoded = path.replace(/%([0-9a-fA-F]{2})/g, (_, digits: string) => {
    const char = String.fromCharCode(Number.parseInt(digits, 16));
    return /[A-Za-z0-9\-._~]/.test(char) ? char : `%${digits.toUpperCase()}`;
  });
  const segments: string[] = [];
  for (const whole of decoded.split("/")) {
    const segment = whole.split(";", 1)[0] ?? "";
    if (segment === "..") segments.pop();
    else if (segment !== "" && segment !== ".") segments.push(segment);
  }
  return `/${segments.join("/")}`;
}

export function normalizeHost(host: string): string {
  const name = host.slice(host.lastIndexOf("@") + 1).replace(/:\d*$/, "");
  return name.replace(/\.$/, "").replace(/[A-Z]+/g, (text) => text.toLowerCase());
}
