//! IDs, names and encryption of reservation records.
//!
//! A record store may be read by more people than may close a reservation (Redis, its backups), and a record contains
//! counter keys, which may contain callers' credentials. So a record's name is a hash of the reservation's ID, and its
//! contents are encrypted with a key derived from the ID, which only the maker has. The claim on an idempotency key is
//! encrypted with a key derived from the request's contents: other contents cannot read it, which is how they are told
//! apart.

use super::ReservationId;
use ring::aead::{self, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{Context, SHA256};
use ring::rand::{SecureRandom, SystemRandom};
use tollgate_core::{RecordName, StoreError};

/// Returns 128 random bits.
pub(super) fn random_bits() -> Result<u128, StoreError> {
    let mut bytes = [0; 16];
    fill(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}

fn fill(bytes: &mut [u8]) -> Result<(), StoreError> {
    let failed = |_| StoreError::Unavailable("the operating system has no random numbers".to_owned());
    SystemRandom::new().fill(bytes).map_err(failed)
}

/// Encryption of one record.
pub(super) struct Seal(LessSafeKey);

/// Returns the name of a reservation's record, and its encryption.
pub(super) fn for_id(id: ReservationId) -> (RecordName, Seal) {
    let id = id.0.to_le_bytes();
    (name(&hash(&[b"reservation", &id])), Seal::new(&hash(&[b"reservation key", &id])))
}

/// Returns the name of an idempotency key's claim, and its encryption for these contents.
pub(super) fn for_key(key: &str, contents: &[u8]) -> (RecordName, Seal) {
    let key = key.as_bytes();
    (name(&hash(&[b"idempotency", key])), Seal::new(&hash(&[b"idempotency key", key, contents])))
}

fn name(hash: &[u8; 32]) -> RecordName {
    let mut name = [0; 16];
    name.copy_from_slice(&hash[..16]);
    RecordName(name)
}

/// Returns SHA-256 of these parts, each with its length.
fn hash(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = Context::new(&SHA256);
    for part in parts {
        context.update(&(part.len() as u64).to_le_bytes());
        context.update(part);
    }
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

impl Seal {
    fn new(key: &[u8; 32]) -> Self {
        let key = UnboundKey::new(&aead::CHACHA20_POLY1305, key).expect("the key has the length it needs");
        Self(LessSafeKey::new(key))
    }

    /// Encrypts, with a random nonce in front.
    pub(super) fn close(&self, plain: &[u8]) -> Result<Vec<u8>, StoreError> {
        let mut nonce = [0; NONCE_LEN];
        fill(&mut nonce)?;
        let mut sealed = plain.to_vec();
        self.0
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::empty(), &mut sealed)
            .map_err(|_| StoreError::Unavailable("a record could not be encrypted".to_owned()))?;
        Ok([&nonce, sealed.as_slice()].concat())
    }

    /// Decrypts; `None` if it was encrypted with another key.
    pub(super) fn open(&self, sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, sealed) = sealed.split_at_checked(NONCE_LEN)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut plain = sealed.to_vec();
        let length = self.0.open_in_place(nonce, Aad::empty(), &mut plain).ok()?.len();
        plain.truncate(length);
        Some(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it a reader of the store reads credentials, or settles what others have reserved.
    #[test]
    fn only_the_holder_reads_a_record() {
        let ids = [1, 2].map(crate::DecisionId);
        let (name, seal) = for_id(ids[0]);
        let sealed = seal.close(b"sk_live_4242424242424242").expect("random numbers");
        assert!(!sealed.windows(8).any(|window| window == b"sk_live_"));
        assert_eq!(seal.open(&sealed).as_deref(), Some(b"sk_live_4242424242424242".as_slice()));
        assert_eq!(for_id(ids[1]).1.open(&sealed), None);
        assert_ne!(name, for_id(ids[1]).0);
        assert_ne!(seal.close(b"x"), seal.close(b"x"));
    }

    /// Without it one idempotency key gives free passes to everybody.
    #[test]
    fn other_contents_do_not_read_a_claim() {
        let (name, seal) = for_key("k", b"alice");
        let sealed = seal.close(b"id").expect("random numbers");
        let (same, other) = for_key("k", b"bob");
        assert_eq!((name, other.open(&sealed)), (same, None));
        assert_eq!(for_key("k", b"alice").1.open(&sealed).as_deref(), Some(b"id".as_slice()));
    }
}
