//! What every server here needs of its runtime: an alarm that many short waits share, and a way to end in good order.
//! The gateway stands on it too.

pub mod alarm;
pub mod drain;
