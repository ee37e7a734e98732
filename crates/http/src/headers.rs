//! Header fields, wherever they lie: in a map, or in the bytes of a head that nobody has made a map of.

use bytes::{BufMut, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Header fields that can be looked up by name.
pub trait HeaderLookup {
    /// All values of a field, in their order.
    fn all(&self, name: &HeaderName) -> impl DoubleEndedIterator<Item = &[u8]>;

    /// All names and values, in the order of the message. Names are as they were written.
    fn each(&self) -> impl Iterator<Item = (&[u8], &[u8])>;

    /// The first value of a field.
    fn first(&self, name: &HeaderName) -> Option<&[u8]> {
        self.all(name).next()
    }

    /// The last value of a field: the one that the nearest proxy wrote.
    fn last(&self, name: &HeaderName) -> Option<&[u8]> {
        self.all(name).next_back()
    }
}

/// What header fields can be put into: a map, or an answer that is being written.
pub trait HeaderSink {
    /// Puts a field there, of which there is at most one.
    fn put(&mut self, name: &HeaderName, value: &[u8]);
}

/// What header fields are appended to, one by one: the bytes of an HTTP/1 head, or a map.
pub trait HeaderAppend {
    /// Appends a field; there may be others of the same name.
    fn add(&mut self, name: &[u8], value: &[u8]);
}

impl HeaderAppend for BytesMut {
    #[inline]
    fn add(&mut self, name: &[u8], value: &[u8]) {
        self.reserve(name.len() + value.len() + 4);
        self.put_slice(name);
        self.put_slice(b": ");
        self.put_slice(value);
        self.put_slice(b"\r\n");
    }
}

impl HeaderAppend for HeaderMap {
    /// A field that no map can contain is left out; the head parser rejects such fields.
    fn add(&mut self, name: &[u8], value: &[u8]) {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            self.append(name, value);
        }
    }
}

impl HeaderSink for HeaderMap {
    /// A value that no field can have is left out.
    fn put(&mut self, name: &HeaderName, value: &[u8]) {
        if let Ok(value) = HeaderValue::from_bytes(value) {
            self.insert(name, value);
        }
    }
}

impl HeaderLookup for HeaderMap {
    fn all(&self, name: &HeaderName) -> impl DoubleEndedIterator<Item = &[u8]> {
        self.get_all(name).iter().map(HeaderValue::as_bytes)
    }

    fn each(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.iter().map(|(name, value)| (name.as_str().as_bytes(), value.as_bytes()))
    }

    fn first(&self, name: &HeaderName) -> Option<&[u8]> {
        self.get(name).map(HeaderValue::as_bytes)
    }
}
