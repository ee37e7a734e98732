//! Counts the descriptors and entries of a rate limit request before it is decoded.
//!
//! A descriptor or an entry without contents is two bytes of a message and 40 times as many in memory and more. Counting takes a few
//! instructions for each descriptor, and none for a message that is too short to have too many.
//!
//! Rejected: a smaller message, because a caller whose header becomes part of it could have it rejected; and a reader of our own
//! that decodes and counts in one pass, because prost's is generated and known.

use super::decode::{BadRequest, MAX_DESCRIPTORS, MAX_ENTRIES, too_many_descriptors, too_many_entries};
use prost::bytes::Buf;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Field of the descriptors in a request.
const DESCRIPTORS: u32 = 2;
/// Field of the entries in a descriptor.
const ENTRIES: u32 = 1;
/// Size of the shortest descriptor or entry.
const SHORTEST: usize = 2;

/// Checks that a message has as many descriptors and entries at most as a request may have. A malformed one is counted up to the
/// place where decoding ends too.
pub(super) fn check(message: &[u8]) -> Result<(), BadRequest> {
    if message.len() <= SHORTEST * MAX_ENTRIES {
        return Ok(());
    }
    let (mut count, mut too_long) = (0, None);
    each(message, DESCRIPTORS, |descriptor| {
        if too_long.is_none() && has_too_many_entries(descriptor) {
            too_long = Some(count);
        }
        count += 1;
        count <= MAX_DESCRIPTORS
    });
    match too_long {
        _ if count > MAX_DESCRIPTORS => Err(too_many_descriptors()),
        Some(descriptor) => Err(too_many_entries(descriptor)),
        None => Ok(()),
    }
}

fn has_too_many_entries(descriptor: &[u8]) -> bool {
    if descriptor.len() <= SHORTEST * MAX_ENTRIES {
        return false;
    }
    let mut count = 0;
    each(descriptor, ENTRIES, |_| {
        count += 1;
        count <= MAX_ENTRIES
    });
    count > MAX_ENTRIES
}

/// Calls `visit` with each message of a field, in order, until it returns false or the rest is malformed.
#[inline]
fn each<'m>(message: &'m [u8], field: u32, mut visit: impl FnMut(&'m [u8]) -> bool) {
    let mut rest = message;
    while let Some(found) = next(&mut rest, field) {
        if found.is_some_and(|found| !visit(found)) {
            return;
        }
    }
}

/// Reads a field. Returns its contents if it is the one that is sought; `None` at the end, or if the rest is malformed.
#[inline]
fn next<'m>(rest: &mut &'m [u8], field: u32) -> Option<Option<&'m [u8]>> {
    // As nearly all of them are written: the key and the length in a byte each.
    if let [key, length @ ..0x80, contents @ ..] = *rest
        && u32::from(*key) == field << 3 | WireType::LengthDelimited as u32
    {
        let found = contents.get(..usize::from(*length))?;
        *rest = &contents[found.len()..];
        return Some(Some(found));
    }
    if rest.is_empty() {
        return None;
    }
    let (tag, kind) = decode_key(rest).ok()?;
    if tag != field {
        skip_field(kind, tag, rest, DecodeContext::default()).ok()?;
        return Some(None);
    }
    if kind != WireType::LengthDelimited {
        return None;
    }
    let length = usize::try_from(decode_varint(rest).ok()?).ok()?;
    let found = rest.get(..length)?;
    rest.advance(length);
    Some(Some(found))
}

#[cfg(test)]
mod tests {
    use super::super::codec;
    use super::super::decode::entries;
    use super::super::proto::envoy::service::ratelimit::v3::RateLimitRequest;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use prost::Message;

    fn field(tag: u8, contents: &[u8]) -> Vec<u8> {
        let mut field = vec![tag << 3 | 2];
        prost::encoding::encode_varint(contents.len() as u64, &mut field);
        field.extend(contents);
        field
    }

    /// A request of empty entries.
    fn request(descriptors: &[usize]) -> Vec<u8> {
        let of = |entries: &usize| field(2, &field(1, &[]).repeat(*entries));
        [field(1, b"d"), descriptors.iter().flat_map(of).collect()].concat()
    }

    /// What decoding and its limits said before there was a count.
    fn decoded(message: &[u8]) -> Result<(), String> {
        let request = RateLimitRequest::decode(message).map_err(|error| error.to_string())?;
        entries(&request).map(drop).map_err(|bad| bad.0)
    }

    #[test]
    fn the_limits_are_those_of_a_decoded_request() {
        for (descriptors, is_valid) in [
            (vec![64; 1_024], true),
            (vec![0; 1_025], false),
            (vec![1; 1_025], false),
            (vec![1, 65, 1], false),
            (vec![65; 1_025], false),
            (vec![65, 66], false),
        ] {
            let message = request(&descriptors);
            assert_eq!(check(&message).map_err(|bad| bad.0), decoded(&message));
            assert_eq!(codec::decode::<RateLimitRequest>(&message).is_ok(), is_valid);
        }
    }

    /// Four megabytes would otherwise be 175 in memory, for each of as many requests as arrive at once.
    #[test]
    fn a_message_of_too_many_parts_is_rejected_before_it_is_decoded() {
        let (many, long) = (field(2, &[]).repeat(2 << 20), field(2, &field(1, &[]).repeat(1 << 20)));
        // Neither what comes first nor what comes last hides them; the last would have it decoded twice.
        let (group, text) = ([0x7b, 0x08, 0x01, 0x7c], field(2, &field(1, &field(1, b"\xff"))));
        for (message, reason) in [
            ([&many[..], &text].concat(), "descriptors: at most 1024 per request"),
            ([&group[..], &many].concat(), "descriptors: at most 1024 per request"),
            ([&text[..], &long].concat(), "descriptors[1].entries: at most 64 per descriptor"),
            ([&long[..], b"\xff"].concat(), "descriptors[0].entries: at most 64 per descriptor"),
        ] {
            let status = codec::decode::<RateLimitRequest>(&message).expect_err("too many");
            assert_eq!((status.code(), status.message()), (tonic::Code::InvalidArgument, reason));
        }
    }

    /// Fields of any kind, in any order, of any number.
    fn fields() -> impl Strategy<Value = Vec<u8>> {
        let text = prop_oneof![Just(b"k".to_vec()), vec(any::<u8>(), 0..4)];
        let entry = vec((1_u8..3, text), 0..3)
            .prop_map(|fields| fields.iter().flat_map(|(tag, text)| field(*tag, text)).collect::<Vec<_>>());
        let limit = Just(field(2, &[0x08, 0x05, 0x10, 0x01]));
        let other = prop_oneof![
            Just(vec![0x18, 0x01]),
            Just(vec![0x20, 0x01]),
            Just(vec![0x7b, 0x0a, 0x00, 0x7c]),
            Just(vec![0x7d, 1, 2, 3, 4]),
            Just(field(15, b"\x12\x00\x12\x00")),
        ];
        let repeated = |one: BoxedStrategy<Vec<u8>>| {
            (one, prop_oneof![1_usize..4, 60_usize..70]).prop_map(|(one, times)| one.repeat(times))
        };
        let entries = repeated(entry.prop_map(|entry| field(1, &entry)).boxed());
        let descriptor = vec(prop_oneof![4 => entries, 1 => limit, 1 => other.clone()], 0..3)
            .prop_map(|fields| field(2, &fields.concat()));
        let descriptors = (descriptor, prop_oneof![9 => 1_usize..4, 1 => 1_000_usize..1_100])
            .prop_map(|(one, times)| one.repeat(times));
        vec(prop_oneof![4 => descriptors, 1 => other], 0..4)
            .prop_map(|fields| [field(1, b"d"), fields.concat()].concat())
    }

    proptest! {
        /// A count that differs would reject what is valid, or let in what is not.
        #[test]
        fn counting_agrees_with_decoding(message in fields(), cut in any::<prop::sample::Index>(), flip in any::<u8>()) {
            let mut broken = message.clone();
            let at = cut.index(broken.len());
            broken[at] ^= flip;
            for message in [&message[..], &message[..at], &broken] {
                let Ok(request) = RateLimitRequest::decode(message) else { continue };
                if request.domain.is_empty() || request.descriptors.is_empty() {
                    prop_assert_eq!(check(message).is_ok(), request.descriptors.iter().all(|one| one.entries.len() <= MAX_ENTRIES)
                        && request.descriptors.len() <= MAX_DESCRIPTORS);
                    continue;
                }
                prop_assert_eq!(check(message).map_err(|bad| bad.0), entries(&request).map(drop).map_err(|bad| bad.0));
            }
        }
    }
}
