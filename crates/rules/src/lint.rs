//! Rules that load and do nothing.

use crate::compile::NodePlace;
use crate::diagnostic::Diagnostic;
use crate::ruleset::{Domain, Source};

pub(crate) fn domain(
    _domain: &Domain,
    _places: &[NodePlace],
    _source: &Source,
    _warnings: &mut Vec<Diagnostic>,
) {
}
