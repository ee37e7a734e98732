//! Whatever another cell sends is read or refused, and what is read is the same after it is written.
#![no_main]

use tollgate_cells::message::{Message, PREFIX, decode, encode};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok((id, mut message)) = decode(bytes) {
        // Counters of an unknown kind are left out, so they are not written again.
        if let Message::Batch(batch) = &mut message {
            std::sync::Arc::make_mut(batch).skipped = 0;
        }
        assert_eq!(decode(&encode(id, &message)[PREFIX..]), Ok((id, message)));
    }
});
