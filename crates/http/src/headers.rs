//! Header field traits, implemented by header maps and by the bytes of a head that was not converted to a map.

use bytes::{BufMut, BytesMut};
use http::header::{HeaderMap, HeaderName, HeaderValue};

/// Header fields that can be looked up by name.
pub trait HeaderLookup {
    /// Returns all values of a field, in message order.
    fn all(&self, name: &HeaderName) -> impl DoubleEndedIterator<Item = &[u8]>;

    /// Returns all names and values, in message order. Names keep their original case.
    fn each(&self) -> impl Iterator<Item = (&[u8], &[u8])>;

    /// Returns the first value of a field.
    fn first(&self, name: &HeaderName) -> Option<&[u8]> {
        self.all(name).next()
    }

    /// Returns the last value of a field, which is the one from the nearest proxy.
    fn last(&self, name: &HeaderName) -> Option<&[u8]> {
        self.all(name).next_back()
    }
}

/// A destination for fields that occur at most once: a map, or a response that is being built.
pub trait HeaderSink {
    /// Sets a field.
    fn put(&mut self, name: &HeaderName, value: &[u8]);
}

/// A destination for fields that may repeat: the bytes of an HTTP/1 head, or a map.
pub trait HeaderAppend {
    /// Appends a field; others of the same name stay.
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
    /// Skips a field that a map cannot contain; the head parser rejects such fields.
    fn add(&mut self, name: &[u8], value: &[u8]) {
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            self.append(name, value);
        }
    }
}

impl HeaderSink for HeaderMap {
    /// Skips a value that is invalid in a field.
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
