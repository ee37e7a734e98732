//! A field's value while it is written: on the stack, and copied once when it is done.

use smallvec::SmallVec;

/// Structured fields have integers of at most 15 digits.
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

    /// What stands between the quotes of a structured field's String: ASCII that can be seen, two of them escaped. A
    /// rule's name may have any character; those that a field cannot have become `?`.
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

    /// A name as a plain value: the same without quotes and escapes.
    pub(crate) fn name(&mut self, text: &str) -> &mut Self {
        self.0.extend(text.chars().map(|char| if matches!(char, ' '..='~') { char as u8 } else { b'?' }));
        self
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What has been written.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}
