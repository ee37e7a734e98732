/** IP addresses and networks, as the gateway parses and writes them. An address is its 4 or 16 bytes. */

export type Address = readonly number[];

export interface Network {
  readonly address: Address;
  readonly bits: number;
}

/** Parses an address; IPv4-mapped IPv6 becomes IPv4. */
export function parseAddress(text: string): Address | null {
  const bytes = parseV4(text) ?? parseV6(text);
  if (bytes !== null && bytes.length === 16 && bytes.slice(0, 10).every((byte) => byte === 0) && bytes[10] === 255 && bytes[11] === 255) return bytes.slice(12);
  return bytes;
}

/** An address with or without brackets and a port, as in `X-Forwarded-For`. */
export function parseHop(text: string): Address | null {
  const trimmed = text.replace(/^[ \t]+|[ \t]+$/g, "");
  const bare = /^\[(.*)\]$/.exec(trimmed)?.[1] ?? trimmed;
  const address = parseAddress(bare);
  if (address !== null) return address;
  const socket = /^(?:\[([^\]]*)\]|([^:]*)):(\d{1,5})$/.exec(trimmed);
  if (socket === null || Number(socket[3]) > 65_535) return null;
  return socket[1] !== undefined ? (socket[1].includes(":") ? parseAddress(socket[1]) : null) : parseV4(socket[2] ?? "");
}

function parseV4(text: string): number[] | null {
  const parts = text.split(".");
  if (parts.length !== 4) return null;
  const bytes: number[] = [];
  for (const part of parts) {
    // A leading zero is octal to some.
    if (!/^(?:0|[1-9]\d{0,2})$/.test(part) || Number(part) > 255) return null;
    bytes.push(Number(part));
  }
  return bytes;
}

function parseV6(text: string): number[] | null {
  const halves = text.split("::");
  if (halves.length > 2) return null;
  const head = groups(halves[0] ?? "", halves.length === 1);
  const tail = halves.length === 2 ? groups(halves[1] ?? "", true) : [];
  if (head === null || tail === null) return null;
  const length = head.length + tail.length;
  if (halves.length === 1 ? length !== 16 : length > 14) return null;
  return [...head, ...new Array<number>(16 - length).fill(0), ...tail];
}

function groups(text: string, mayEndInV4: boolean): number[] | null {
  if (text === "") return [];
  const bytes: number[] = [];
  const parts = text.split(":");
  for (const [at, part] of parts.entries()) {
    if (at === parts.length - 1 && mayEndInV4 && part.includes(".")) {
      const v4 = parseV4(part);
      if (v4 === null) return null;
      bytes.push(...v4);
    } else {
      if (!/^[0-9a-fA-F]{1,4}$/.test(part)) return null;
      const group = Number.parseInt(part, 16);
      bytes.push(group >> 8, group & 255);
    }
  }
  return bytes;
}

/** `10.0.0.0/8`, `2001:db8::/32` or an address. */
export function parseNetwork(text: string): Network | null {
  const at = text.indexOf("/");
  const bytes = at < 0 ? text : text.slice(0, at);
  const address = parseV4(bytes) ?? parseV6(bytes);
  if (address === null) return null;
  const digits = at < 0 ? String(address.length * 8) : text.slice(at + 1);
  if (!/^\d{1,3}$/.test(digits) || Number(digits) > address.length * 8) return null;
  return { address, bits: Number(digits) };
}

export function contains(network: Network, address: Address): boolean {
  if (network.address.length !== address.length) return false;
  const cut = truncate(address, network.bits), own = truncate(network.address, network.bits);
  return cut.every((byte, at) => byte === own[at]);
}

export function truncate(address: Address, bits: number): Address {
  return address.map((byte, at) => {
    const kept = Math.max(0, Math.min(8, bits - at * 8));
    return byte & (0xff << (8 - kept)) & 0xff;
  });
}

/** Dotted, or as RFC 5952 writes IPv6. */
export function formatAddress(address: Address): string {
  if (address.length === 4) return address.join(".");
  const words: number[] = [];
  for (let at = 0; at < 16; at += 2) words.push(((address[at] ?? 0) << 8) | (address[at + 1] ?? 0));
  let [best, bestLength] = [-1, 1];
  for (let at = 0; at < 8; at += 1) {
    let length = 0;
    while (at + length < 8 && words[at + length] === 0) length += 1;
    if (length > bestLength) [best, bestLength] = [at, length];
  }
  const hex = (part: number[]): string => part.map((word) => word.toString(16)).join(":");
  return best < 0 ? hex(words) : `${hex(words.slice(0, best))}::${hex(words.slice(best + bestLength))}`;
}
