//! What every counter store must do, as a suite that each of them runs.
