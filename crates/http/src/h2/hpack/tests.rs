use super::*;

/// Decodes a block into names and values.
fn decoded(decoder: &mut Decoder, block: &[u8]) -> Result<Vec<(String, String)>, Undecodable> {
    let mut head = Head::new(1 << 20);
    decoder.decode(block, &mut head)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    use crate::headers::HeaderLookup;
    let pseudo = [(":method", head.method()), (":path", head.path()), (":authority", head.authority())];
    let pseudo = pseudo
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name.to_owned(), text(value)));
    Ok(pseudo.chain(head.each().map(|(name, value)| (text(name), text(value)))).collect())
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16).expect("hex");
    digits.chunks(2).map(byte).collect()
}

/// The requests of RFC 7541, appendices C.3 (as they are) and C.4 (with Huffman codes), each on one connection.
#[test]
fn requests_of_the_standard_are_decoded() {
    let base = [(":method", "GET"), (":path", "/"), (":authority", "www.example.com")];
    let second = [base[0], base[1], base[2], ("cache-control", "no-cache")];
    let third = [(":method", "GET"), (":path", "/index.html"), base[2], ("custom-key", "custom-value")];
    for blocks in [
        [
            "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
            "8286 84be 5808 6e6f 2d63 6163 6865",
            "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
        ],
        [
            "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
            "8286 84be 5886 a8eb 1064 9cbf",
            "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
        ],
    ] {
        let mut decoder = Decoder::default();
        for (block, expected) in blocks.into_iter().zip([&base[..], &second, &third]) {
            let expected: Vec<_> = expected.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
            assert_eq!(decoded(&mut decoder, &unhex(block)), Ok(expected), "{block}");
        }
        assert_eq!((decoder.table.len(), decoder.size), (3, 164));
    }
}

/// A table that keeps more than it may would be memory that a client decides on; one that keeps less would mix up fields.
#[test]
fn the_table_forgets_the_oldest_fields() {
    let mut decoder = Decoder::default();
    let literal = |name: &str, value: &str| {
        let mut block = vec![0x40];
        for text in [name, value] {
            block.extend_from_slice(&integer_bytes(text.len(), 7, 0));
            block.extend_from_slice(text.as_bytes());
        }
        block
    };
    let long = "v".repeat(1_000);
    for name in ["a", "b", "c", "d"] {
        decoded(&mut decoder, &literal(name, &long)).expect("valid");
    }
    assert_eq!((decoder.table.len(), decoder.size), (3, 3 * 1_033));
    assert_eq!(decoded(&mut decoder, &[0x80 | 64]).expect("the oldest")[0].0, "b");
    assert_eq!(decoded(&mut decoder, &[0x80 | 65]), Err(Malformed));
    // A name that is evicted by the field that it is used for.
    let mut block = vec![0x40 | 0x3f, 1];
    block.extend_from_slice(&integer_bytes(3_900, 7, 0));
    block.extend_from_slice(&[b'x'; 3_900]);
    assert_eq!(decoded(&mut decoder, &block).expect("valid")[0].0, "b");
    assert_eq!((decoder.table.len(), decoder.size), (1, 3_933));
    // One that is larger than the table empties it.
    decoded(&mut decoder, &literal("e", &"v".repeat(4_096))).expect("valid");
    assert_eq!((decoder.table.len(), decoder.size), (0, 0));
}

#[test]
fn the_client_may_make_the_table_smaller_and_no_larger() {
    let mut decoder = Decoder::default();
    decoded(&mut decoder, b"\x40\x01a\x01b\x40\x01c\x01d").expect("valid");
    decoded(&mut decoder, &[&integer_bytes(40, 5, 0x20)[..], b"\xbe"].concat()).expect("valid");
    assert_eq!((decoder.table.len(), decoder.max_size), (1, 40));
    decoded(&mut decoder, &integer_bytes(4_096, 5, 0x20)).expect("valid");
    assert_eq!(decoded(&mut decoder, &integer_bytes(4_097, 5, 0x20)), Err(Malformed));
    assert_eq!(decoded(&mut Decoder::default(), b"\x82\x20"), Err(Malformed), "only at the beginning");
}

#[test]
fn what_is_cut_short_or_too_large_is_malformed() {
    for block in [
        &[0x80][..],
        &[0xff, 0xff],
        &[0xff, 0xff, 0xff, 0xff, 0xff, 0x0f],
        &[0x40],
        &[0x40, 0x01],
        &[0x40, 0x01, b'a'],
        &[0x40, 0x01, b'a', 0x05, b'b'],
        &[0x41],
        &[0x40, 0x81, 0xff, 0x00],
    ] {
        assert_eq!(decoded(&mut Decoder::default(), block), Err(Malformed), "{block:x?}");
    }
}

fn integer_bytes(value: usize, prefix: u32, flags: u8) -> Vec<u8> {
    let mut block = BytesMut::new();
    put_integer(value, prefix, &mut block);
    block[0] |= flags;
    block.to_vec()
}

proptest::proptest! {
    #[test]
    fn integers_come_back(value in 0_usize..1 << 28, prefix in 4_u32..8) {
        let bytes = integer_bytes(value, prefix, 0);
        let mut rest = &bytes[..];
        proptest::prop_assert_eq!(integer(&mut rest, prefix), Ok(value));
        proptest::prop_assert!(rest.is_empty());
    }

    /// Any bytes are decoded or rejected, and never keep more than the table may.
    #[test]
    fn the_table_is_bounded(blocks in proptest::collection::vec(proptest::collection::vec(proptest::prelude::any::<u8>(), 0..80), 1..20)) {
        let mut decoder = Decoder::default();
        for block in blocks {
            if decoded(&mut decoder, &block).is_err() {
                break;
            }
            let size: usize = decoder.table.iter().map(|field| field.text.len() + FIELD_OVERHEAD).sum();
            proptest::prop_assert_eq!(size, decoder.size);
            proptest::prop_assert!(size <= TABLE_SIZE);
        }
    }

    /// What we encode means the same to a decoder.
    #[test]
    fn our_fields_come_back(fields in proptest::collection::vec(("[a-z][a-z0-9-]{0,20}", "[!-~]([ -~]{0,200}[!-~])?"), 0..10)) {
        let mut block = BytesMut::new();
        let fields: Vec<_> = fields.into_iter().filter(|(name, _)| !["te", "connection", "upgrade", "content-length"].contains(&name.as_str())).collect();
        for (name, value) in &fields {
            encode_field(name.as_bytes(), value.as_bytes(), &mut block);
        }
        proptest::prop_assert_eq!(decoded(&mut Decoder::default(), &block), Ok(fields));
    }
}
