//! A header field value builder. The value is built on the stack and copied once when it is complete.

use smallvec::SmallVec;

/// The maximum integer of structured fields, which has 15 digits.
const MAX_INTEGER: u64 = 999_999_999_999_999;

#[derive(Default)]
pub(crate) struct FieldValue(SmallVec<[u8; 256]>);

impl FieldValue {
    pub(crate) fn text(&mut self, text: &str) -> &mut Self {
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    pub(crate) fn number(&mut self, number: u64) -> &mut Self {
        let (mut digits, mut at, mut rest) = ([0_u8; 15], 15, number.min(MAX_INTEGER));
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.0.extend_from_slice(&digits[at..]);
        self
    }

    /// Appends the content of a structured field String: visible ASCII, with `"` and `\` escaped. A rule name may
    /// contain any character; those that are invalid in a field become `?`.
    pub(crate) fn quoted(&mut self, text: &str) -> &mut Self {
        for char in text.chars() {
            match char {
                '"' | '\\' => self.0.extend_from_slice(&[b'\\', char as u8]),
                ' '..='~' => self.0.push(char as u8),
                _ => self.0.push(b'?'),
            }
        }
        self
    }

    /// Appends a name as a plain value, without escapes.
    pub(crate) fn name(&mut self, text: &str) -> &mut Self {
        self.0.extend(text.chars().map(|char| if matches!(char, ' '..='~') { char as u8 } else { b'?' }));
        self
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the bytes of the value.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
