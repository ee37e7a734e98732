//! The parser, compared with a simple encoder and with input split at every byte; and the inputs that it must reject.

use super::*;
use proptest::prelude::*;

fn encode(words: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Parses all commands of a buffer. Returns them with the number of bytes consumed and the error, if any.
fn all(buffer: &[u8]) -> (Vec<Vec<Vec<u8>>>, usize, Option<Fault>) {
    let (mut commands, mut at, mut words) = (Vec::new(), 0, Words::new());
    loop {
        match parse(&buffer[at..], &mut words) {
            Ok(Some(length)) => {
                commands.push(words.iter().map(|word| word.to_vec()).collect());
                at += length;
            }
            Ok(None) => return (commands, at, None),
            Err(fault) => return (commands, at, Some(fault)),
        }
    }
}

/// Parses the same bytes in two pieces, like a connection that keeps the rest of a read.
fn in_two(buffer: &[u8], cut: usize) -> (Vec<Vec<Vec<u8>>>, usize, Option<Fault>) {
    let (mut commands, done, fault) = all(&buffer[..cut]);
    if fault.is_some() {
        return (commands, done, fault);
    }
    let (more, at, fault) = all(&buffer[done..]);
    commands.extend(more);
    (commands, done + at, fault)
}

proptest! {
    #[test]
    fn encoded_commands_are_parsed_back(
        commands in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..12), 0..6),
    ) {
        let bytes: Vec<u8> = commands.iter().flat_map(|words| encode(words)).collect();
        let (read, done, fault) = all(&bytes);
        prop_assert_eq!(read, commands);
        prop_assert_eq!((done, fault), (bytes.len(), None));
    }

    #[test]
    fn the_result_does_not_depend_on_how_the_bytes_are_split(
        commands in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5), 1..4),
        broken in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        let mut bytes: Vec<u8> = commands.iter().flat_map(|words| encode(words)).collect();
        if let Some((at, byte)) = broken {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let whole = all(&bytes);
        for cut in 0..=bytes.len() {
            prop_assert_eq!(in_two(&bytes, cut), whole.clone(), "cut at {}", cut);
        }
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(
        prop::sample::select(b"*$-0123456789\r\nPING+:x".to_vec()), 0..60)) {
        let (_, done, _) = all(&bytes);
        prop_assert!(done <= bytes.len());
    }

    #[test]
    fn integers_are_those_of_the_standard_library(number: i64, text in "-?[0-9]{0,21}|[-+ 0-9a-z.]{0,6}") {
        prop_assert_eq!(integer(number.to_string().as_bytes()), Some(number));
        let plain = !text.starts_with('+') && text.trim_start_matches('-').len() <= 19;
        let expected = text.parse::<i64>().ok().filter(|_| plain);
        prop_assert_eq!(integer(text.as_bytes()), expected, "{}", text);
    }
}

#[test]
fn invalid_commands_are_rejected_immediately() {
    let long = format!("*{}\r\n", "1".repeat(30));
    let cases: [(&[u8], Fault); 22] = [
        (b"PING\r\n", Fault::Inline),
        (b"GET / HTTP/1.1\r\n", Fault::Inline),
        (b"\r\n", Fault::Inline),
        (b"\0", Fault::Inline),
        (b"$4\r\nPING\r\n", Fault::Inline),
        (b"\x16\x03\x01", Fault::Inline),
        (b"*x", Fault::NoNumber),
        (b"*\r", Fault::NoNumber),
        (b"*-\r", Fault::NoNumber),
        (b"*1\n", Fault::NoNumber),
        (b"*1\rx", Fault::NoNumber),
        (b"*+1", Fault::NoNumber),
        (b"* 1", Fault::NoNumber),
        (long.as_bytes(), Fault::NoNumber),
        (b"*257\r\n", Fault::TooManyWords),
        (b"*99999999999999999999\r\n", Fault::TooManyWords),
        (b"*1\r\n:", Fault::NoString),
        (b"*1\r\n*", Fault::NoString),
        (b"*1\r\n$-1\r\n", Fault::NoWord),
        (b"*1\r\n$32769\r\n", Fault::WordTooLong),
        (b"*1\r\n$4\r\nPINGx", Fault::WrongLength),
        (b"*1\r\n$4\r\nPING\rx", Fault::WrongLength),
    ];
    for (bytes, fault) in cases {
        let (commands, _, seen) = all(bytes);
        assert_eq!((commands.len(), seen), (0, Some(fault)), "{}", bytes.escape_ascii());
        assert!(!fault.message().contains(['\r', '\n']), "{fault:?}");
    }
}

/// Two words that are each within the limit can exceed the limit of a command.
#[test]
fn the_size_of_a_command_is_bounded() {
    let command = |words: usize| encode(&vec![vec![b'x'; MAX_WORD]; words]);
    assert_eq!(all(&command(1)).0.len(), 1);
    let (commands, done, fault) = all(&command(2));
    assert_eq!((commands.len(), done, fault), (0, 0, Some(Fault::TooLarge)));
}

/// Redis skips a command without words, and clients rely on that.
#[test]
fn empty_commands_are_skipped() {
    let (commands, done, fault) = all(b"*0\r\n*-1\r\n*1\r\n$4\r\nPING\r\n");
    assert_eq!(commands, [vec![], vec![], vec![b"PING".to_vec()]]);
    assert_eq!((done, fault), (23, None));
}
