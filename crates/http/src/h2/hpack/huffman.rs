//! The Huffman code of HPACK (RFC 7541, appendix B). It is canonical, so the lengths of the codes are all of it.

/// Length of the code of each byte. The end of a string, which no string contains, has the last code of 30 bits.
const LENGTHS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, //
    28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28, //
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, //
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, //
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, //
    7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, //
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, //
    6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, //
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, //
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, //
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, //
    21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23, //
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, //
    19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27, //
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, //
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, //
];

const MAX_LENGTH: usize = 30;

/// What the lengths say, arranged for decoding.
struct Code {
    /// By the next eight bits: the byte, and the length of its code; 0 if that is longer.
    short: [(u8, u8); 256],
    /// By length: where the codes of this length begin and end, with their first bit at the left of 32.
    begins: [u32; MAX_LENGTH + 1],
    ends: [u32; MAX_LENGTH + 1],
    /// By length: the index in `bytes` of the first code.
    first: [u16; MAX_LENGTH + 1],
    /// All bytes, in the order of their codes.
    bytes: [u8; 256],
}

static CODE: Code = arrange();

const fn arrange() -> Code {
    let mut code = Code {
        short: [(0, 0); 256],
        begins: [0; MAX_LENGTH + 1],
        ends: [0; MAX_LENGTH + 1],
        first: [0; MAX_LENGTH + 1],
        bytes: [0; 256],
    };
    let (mut next, mut count, mut length) = (0_u32, 0, 1);
    while length <= MAX_LENGTH {
        let step = 1 << (32 - length);
        (code.begins[length], code.first[length]) = (next, count as u16);
        let mut byte = 0;
        while byte < 256 {
            if LENGTHS[byte] as usize == length {
                code.bytes[count] = byte as u8;
                count += 1;
                let mut at = (next >> 24) as usize;
                next += step;
                while length <= 8 && at < (next >> 24) as usize {
                    code.short[at] = (byte as u8, length as u8);
                    at += 1;
                }
            }
            byte += 1;
        }
        code.ends[length] = next;
        length += 1;
    }
    code
}

/// Appends the decoded text to `out`. Returns false if it is not valid.
#[must_use]
pub(super) fn decode(mut coded: &[u8], out: &mut Vec<u8>) -> bool {
    // The bits that were read and not decoded, at the left.
    let (mut bits, mut count) = (0_u64, 0_u32);
    loop {
        while count <= 56 {
            let Some((byte, rest)) = coded.split_first() else { break };
            bits |= u64::from(*byte) << (56 - count);
            (coded, count) = (rest, count + 8);
        }
        let (mut byte, mut length) = CODE.short[(bits >> 56) as usize];
        if length == 0 {
            let next = (bits >> 32) as u32;
            let Some(long) = (9..=MAX_LENGTH).find(|length| next < CODE.ends[*length]) else { break };
            let at = (next - CODE.begins[long]) >> (32 - long);
            (byte, length) = (CODE.bytes[usize::from(CODE.first[long]) + at as usize], long as u8);
        }
        if u32::from(length) > count {
            break;
        }
        out.push(byte);
        (bits, count) = (bits << length, count - u32::from(length));
    }
    // The rest of the last byte is filled with ones.
    count < 8 && coded.is_empty() && (bits >> 56) as u8 == !(u8::MAX.unbounded_shr(count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Encodes as a client does: each byte's code, counted up from the lengths alone.
    fn encode(text: &[u8]) -> Vec<u8> {
        let mut codes = [0_u32; 256];
        let (mut code, mut last) = (0, 5);
        for length in 5..=30 {
            for byte in 0..256 {
                if LENGTHS[byte] == length {
                    code <<= length - last;
                    last = length;
                    codes[byte] = code;
                    code += 1;
                }
            }
        }
        assert_eq!(code, (1 << 30) - 1, "what is left is the end of a string");
        let bits = text.iter().flat_map(|byte| {
            let (code, length) = (codes[usize::from(*byte)], LENGTHS[usize::from(*byte)]);
            (0..length).rev().map(move |bit| code >> bit & 1 == 1)
        });
        let bits: Vec<bool> = bits.collect();
        let byte =
            |bits: &[bool]| (0..8).fold(0, |byte, at| byte << 1 | u8::from(*bits.get(at).unwrap_or(&true)));
        bits.chunks(8).map(byte).collect()
    }

    fn decoded(coded: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        decode(coded, &mut out).then_some(out)
    }

    /// Examples of RFC 7541, appendix C.4 and C.6.
    #[test]
    fn examples_of_the_standard_are_decoded() {
        for (coded, text) in [
            (
                &[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff][..],
                "www.example.com",
            ),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x25, 0xa8, 0x49, 0xe9, 0x5b, 0xb8, 0xe8, 0xb4, 0xbf], "custom-value"),
            (&[0x64, 0x02], "302"),
            (&[], ""),
        ] {
            assert_eq!(decoded(coded).as_deref(), Some(text.as_bytes()), "{coded:x?}");
        }
    }

    #[test]
    fn wrong_padding_and_the_end_of_a_string_are_invalid() {
        // `a` (00011) with zeros behind it, with a whole byte of ones, and the code of the end.
        for coded in [&[0b0001_1000][..], &[0b0001_1111, 0xff], &[0xff, 0xff, 0xff, 0xff], &[0xff]] {
            assert_eq!(decoded(coded), None, "{coded:x?}");
        }
        assert_eq!(decoded(&[0b0001_1111]).as_deref(), Some(&b"a"[..]));
    }

    proptest! {
        #[test]
        fn every_text_comes_back(text in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert_eq!(decoded(&encode(&text)), Some(text));
        }

        #[test]
        fn what_is_accepted_is_the_code_of_what_it_means(coded in prop::collection::vec(any::<u8>(), 0..40)) {
            if let Some(text) = decoded(&coded) {
                prop_assert_eq!(encode(&text), coded);
            }
        }
    }
}
