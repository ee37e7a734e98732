/** SHA-256 without waiting: `crypto.subtle` is asynchronous, and a middleware's identity is not. Only overlong values are hashed. */

const K = new Uint32Array(64);
const INITIAL = new Uint32Array(8);

// The first 32 bits of the fractional parts of the cube and square roots of the first primes.
for (let candidate = 2, found = 0; found < 64; candidate += 1) {
  let isPrime = true;
  for (let divisor = 2; divisor * divisor <= candidate; divisor += 1) if (candidate % divisor === 0) isPrime = false;
  if (!isPrime) continue;
  const fraction = (root: number): number => Math.floor((root - Math.floor(root)) * 2 ** 32);
  if (found < 8) INITIAL[found] = fraction(Math.sqrt(candidate));
  K[found] = fraction(Math.cbrt(candidate));
  found += 1;
}

const rotate = (word: number, bits: number): number => (word >>> bits) | (word << (32 - bits));

export function sha256(bytes: Uint8Array): Uint8Array {
  const padded = new Uint8Array(((bytes.length + 8) >> 6) * 64 + 64);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(bytes.length / 2 ** 29));
  view.setUint32(padded.length - 4, bytes.length << 3);
  const state = INITIAL.slice();
  const words = new Uint32Array(64);
  const word = (at: number): number => words[at] as number;
  for (let block = 0; block < padded.length; block += 64) {
    for (let at = 0; at < 16; at += 1) words[at] = view.getUint32(block + at * 4);
    for (let at = 16; at < 64; at += 1) {
      const a = word(at - 15), b = word(at - 2);
      words[at] = word(at - 16) + (rotate(a, 7) ^ rotate(a, 18) ^ (a >>> 3)) + word(at - 7) + (rotate(b, 17) ^ rotate(b, 19) ^ (b >>> 10));
    }
    let [a, b, c, d, e, f, g, h] = state as unknown as [number, number, number, number, number, number, number, number];
    for (let at = 0; at < 64; at += 1) {
      const t1 = (h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + (K[at] as number) + word(at)) | 0;
      const t2 = ((rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c))) | 0;
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
    }
    for (const [at, value] of [a, b, c, d, e, f, g, h].entries()) state[at] = (state[at] as number) + value;
  }
  const digest = new Uint8Array(32);
  const out = new DataView(digest.buffer);
  state.forEach((value, at) => out.setUint32(at * 4, value));
  return digest;
}
