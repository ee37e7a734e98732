//! A note about rules in several stores that one request may match: each store is another call, a denial in one must be
//! undone in the others, and the request depends on all of them.

use crate::compile::NodeLocation;
use crate::diagnostic::Severity;
use crate::reader::Reader;
use crate::ruleset::Domain;
use crate::tree::ValueTest;
use tollgate_core::Mode;

/// The maximum number of pairs of rules that are compared; more would take too long.
const MAX_PAIRS: usize = 20_000;

pub(super) fn several(domain: &Domain, places: &[NodeLocation], reader: &mut Reader<'_>) {
    let rules: Vec<(usize, Option<&str>)> = domain
        .tree
        .iter()
        .enumerate()
        .filter_map(|(at, node)| Some((at, &domain.rules[node.rule? as usize])))
        .filter(|(_, rule)| rule.mode != Mode::Local && rule.all_limits().next().is_some())
        .map(|(at, rule)| (at, rule.store.as_deref()))
        .collect();
    if rules.windows(2).all(|pair| pair[0].1 == pair[1].1) {
        return;
    }
    let pairs =
        rules.iter().enumerate().flat_map(|(i, later)| rules[..i].iter().map(move |first| (first, later)));
    let both = pairs
        .take(MAX_PAIRS)
        .find(|((first, one), (later, other))| one != other && may_match_together(domain, *first, *later));
    if let Some(((_, one), (later, other))) = both {
        let name = |store: &Option<&str>| store.map_or_else(|| "default".to_owned(), ToOwned::to_owned);
        let message = format!(
            "a request may match rules of the stores `{}` and `{}`: each is another call, and a denial in one is undone in \
             the other",
            name(one),
            name(other)
        );
        let help =
            "name one store for the rules that one request matches, at the top of the file or on their group";
        reader.warn(Severity::Note, places[*later].at, message, help);
    }
}

/// Returns whether a request can match both rules: of the descriptors of one key at one level, a value matches one.
fn may_match_together(domain: &Domain, first: usize, later: usize) -> bool {
    let path = |node: usize| u32::try_from(node).map(|node| domain.path(node)).unwrap_or_default();
    let (first, later) = (path(first), path(later));
    let Some(fork) = first.iter().zip(&later).position(|(one, other)| one != other) else { return true };
    let element = |node: &u32| &domain.tree[*node as usize].element;
    if element(&first[fork]).key == element(&later[fork]).key {
        return false;
    }
    let conflicts = |one: &u32, other: &u32| match (&element(one).test, &element(other).test) {
        (ValueTest::Exact(a), ValueTest::Exact(b)) => element(one).key == element(other).key && a != b,
        _ => false,
    };
    !first.iter().any(|one| later.iter().any(|other| conflicts(one, other)))
}
