//! What is observed of decisions: recorded, written and warned of.

mod decision_text;
mod recorder;
mod soft_limits;
