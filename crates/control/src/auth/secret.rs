//! Random ids and secrets, and the hash that a secret is stored as.

use crate::error::ControlError;
use argon2::{Algorithm, Argon2, Params, Version};
use ring::rand::{SecureRandom, SystemRandom};

/// Generates a random id.
pub(crate) fn generate_id() -> Result<String, ControlError> {
    random::<8>().map(|bytes| hex(&bytes))
}

pub(crate) fn random<const N: usize>() -> Result<[u8; N], ControlError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| ControlError::Corrupt("no randomness".to_owned()))?;
    Ok(bytes)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hashes a secret with Argon2id, 19 MiB and two passes.
pub(crate) fn argon2_hash(secret: &[u8], salt: &[u8]) -> Result<Vec<u8>, ControlError> {
    let failed = |error: argon2::Error| ControlError::Corrupt(error.to_string());
    let params = Params::new(19_456, 2, 1, Some(32)).map_err(failed)?;
    let mut hash = vec![0; 32];
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password_into(secret, salt, &mut hash)
        .map_err(failed)?;
    Ok(hash)
}
