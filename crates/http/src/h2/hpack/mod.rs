//! Header compression of HTTP/2 (RFC 7541). Clients' fields are decoded with the dynamic table, in which each keeps what it
//! means for a request, so that a repeated field is not examined again. Our own fields are encoded without a table: a
//! response has few, and a table would be state for each connection to keep in step with the client's settings.

mod huffman;
mod static_table;

use super::head::{Head, Meaning, NameKind};
use bytes::{BufMut, BytesMut};
use static_table::STATIC_TABLE;
use std::collections::VecDeque;

/// Size of the dynamic table that clients may use: the default, which is never changed by our settings.
pub(super) const TABLE_SIZE: usize = 4_096;
/// What a field counts beside its text.
pub(super) const FIELD_OVERHEAD: usize = 32;

/// The state of decompression, which every header block of a connection changes.
#[derive(Debug)]
pub(super) struct Decoder {
    table: VecDeque<Field>,
    size: usize,
    max_size: usize,
    /// A name and a value that are being decoded.
    name: Vec<u8>,
    value: Vec<u8>,
}

/// A field of the dynamic table.
#[derive(Debug)]
struct Field {
    /// The name, and then the value.
    text: Box<[u8]>,
    name: usize,
    kind: NameKind,
    meaning: Meaning,
}

impl Field {
    fn name(&self) -> &[u8] {
        &self.text[..self.name]
    }
}

/// A header block cannot be decoded; the state of the connection is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Undecodable {
    /// It is not what RFC 7541 describes.
    Malformed,
    /// Its fields take much more than a head may have. A few bytes can be a reference to many.
    Flood,
}

use Undecodable::Malformed;

impl Default for Decoder {
    fn default() -> Self {
        Self { table: VecDeque::new(), size: 0, max_size: TABLE_SIZE, name: Vec::new(), value: Vec::new() }
    }
}

impl Decoder {
    /// Decodes a complete block and adds its fields to `head`.
    pub(super) fn decode(&mut self, mut block: &[u8], head: &mut Head) -> Result<(), Undecodable> {
        let mut may_resize = true;
        while let Some(first) = block.first().copied() {
            match first {
                0x80.. => self.indexed(integer(&mut block, 7)?, head)?,
                0x40.. => self.literal(&mut block, 6, true, head)?,
                0x20.. if may_resize => {
                    self.resize(integer(&mut block, 5)?)?;
                    continue;
                }
                0x20.. => return Err(Malformed),
                // Without indexing, or never indexed.
                _ => self.literal(&mut block, 4, false, head)?,
            }
            may_resize = false;
            if head.is_flood() {
                return Err(Undecodable::Flood);
            }
        }
        Ok(())
    }

    /// Frees memory that earlier fields have needed.
    pub(super) fn shrink(&mut self) {
        (self.name, self.value) = (Vec::new(), Vec::new());
        self.table.shrink_to_fit();
    }

    fn indexed(&self, index: usize, head: &mut Head) -> Result<(), Undecodable> {
        let at = index.checked_sub(1).ok_or(Malformed)?;
        if let Some((name, value)) = STATIC_TABLE.get(at) {
            let (name, value) = (name.as_bytes(), value.as_bytes());
            head.push(Meaning::of(NameKind::of(name), value), name, value);
        } else {
            let field = self.table.get(at - STATIC_TABLE.len()).ok_or(Malformed)?;
            let (name, value) = field.text.split_at(field.name);
            head.push(field.meaning, name, value);
        }
        Ok(())
    }

    fn literal(
        &mut self,
        block: &mut &[u8],
        prefix: u32,
        is_indexed: bool,
        head: &mut Head,
    ) -> Result<(), Undecodable> {
        let index = integer(block, prefix)?;
        let known = index.checked_sub(1);
        if known.is_none() {
            self.name.clear();
            string(block, &mut self.name)?;
        }
        self.value.clear();
        string(block, &mut self.value)?;
        let (name, kind) = match known {
            None => (&self.name[..], NameKind::of(&self.name)),
            Some(at) => match STATIC_TABLE.get(at) {
                Some((name, _)) => (name.as_bytes(), NameKind::of(name.as_bytes())),
                None => {
                    let field = self.table.get(at - STATIC_TABLE.len()).ok_or(Malformed)?;
                    (field.name(), field.kind)
                }
            },
        };
        let meaning = Meaning::of(kind, &self.value);
        head.push(meaning, name, &self.value);
        if is_indexed {
            let size = name.len() + self.value.len() + FIELD_OVERHEAD;
            // One that is larger than the table empties it.
            let field = (size <= self.max_size).then(|| Field {
                text: [name, &self.value].concat().into_boxed_slice(),
                name: name.len(),
                kind,
                meaning,
            });
            self.evict(self.max_size.saturating_sub(size));
            if let Some(field) = field {
                self.table.push_front(field);
                self.size += size;
            }
        }
        Ok(())
    }

    fn resize(&mut self, size: usize) -> Result<(), Undecodable> {
        if size > TABLE_SIZE {
            return Err(Malformed);
        }
        self.max_size = size;
        self.evict(size);
        Ok(())
    }

    /// Removes the oldest fields until the others have at most this size.
    fn evict(&mut self, size: usize) {
        while self.size > size {
            let Some(field) = self.table.pop_back() else { return };
            self.size -= field.text.len() + FIELD_OVERHEAD;
        }
    }
}

/// Takes an integer whose first byte has `prefix` bits of it.
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, Undecodable> {
    let (first, mut rest) = block.split_first().ok_or(Malformed)?;
    let max = u8::MAX >> (8 - prefix);
    let mut value = usize::from(first & max);
    if value == usize::from(max) {
        // No length or index has more than 28 bits.
        let mut shift = 0;
        loop {
            let (byte, after) = rest.split_first().ok_or(Malformed)?;
            if shift > 21 {
                return Err(Malformed);
            }
            (value, rest) = (value + (usize::from(byte & 0x7f) << shift), after);
            shift += 7;
            if byte & 0x80 == 0 {
                break;
            }
        }
    }
    *block = rest;
    Ok(value)
}

/// Takes a string and appends its text to `out`.
fn string(block: &mut &[u8], out: &mut Vec<u8>) -> Result<(), Undecodable> {
    let is_coded = block.first().is_some_and(|first| first & 0x80 != 0);
    let length = integer(block, 7)?;
    let (text, rest) = block.split_at_checked(length).ok_or(Malformed)?;
    *block = rest;
    if !is_coded {
        out.extend_from_slice(text);
    } else if !huffman::decode(text, out) {
        return Err(Malformed);
    }
    Ok(())
}

/// Appends a field to a header block, as a literal that no table keeps. The name is in lower case.
pub fn encode_field(name: &[u8], value: &[u8], block: &mut BytesMut) {
    block.reserve(name.len() + value.len() + 12);
    let indexed = STATIC_TABLE.iter().position(|(known, _)| known.as_bytes() == name);
    match indexed {
        Some(at) => put_integer(at + 1, 4, block),
        None => {
            block.put_u8(0);
            put_string(name, block);
        }
    }
    put_string(value, block);
}

fn put_string(text: &[u8], block: &mut BytesMut) {
    put_integer(text.len(), 7, block);
    block.put_slice(text);
}

/// Appends an integer with `prefix` bits in its first byte, whose other bits are zero.
fn put_integer(mut value: usize, prefix: u32, block: &mut BytesMut) {
    let max = usize::from(u8::MAX >> (8 - prefix));
    if value < max {
        return block.put_u8(value as u8);
    }
    block.put_u8(max as u8);
    value -= max;
    while value >= 0x80 {
        block.put_u8(0x80 | value as u8);
        value >>= 7;
    }
    block.put_u8(value as u8);
}

#[cfg(test)]
mod tests;
