//! Roster: the other cells' nodes by index, and the cells that they form.
//!
//! The roster is fixed if the peers are configured. If they are learned, it is replaced as a whole when they change, and
//! a peer keeps its index for as long as it is there, because its outbox and its link are found by it.

use crate::members::PeerConfig;

/// Largest number of peers that are learned.
pub(crate) const MAX_LEARNED: usize = 255;

/// Peers by index, and cells.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roster {
    peers: Vec<Option<PeerConfig>>,
    /// The nodes of each other cell, as indexes of peers.
    pub(crate) cells: Vec<Vec<usize>>,
}

/// What has changed about the peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerChanges {
    /// New peers, with their indexes.
    pub added: Vec<(usize, PeerConfig)>,
    /// Indexes of peers that are gone.
    pub removed: Vec<usize>,
}

impl Roster {
    pub(crate) fn new(peers: Vec<Option<PeerConfig>>) -> Self {
        let mut cells: Vec<Vec<usize>> = Vec::new();
        let known = peers.iter().enumerate().filter_map(|(at, peer)| Some((at, peer.as_ref()?)));
        for (at, peer) in known {
            let is_same = |cell: &&mut Vec<usize>| {
                peers[cell[0]].as_ref().is_some_and(|first| first.store == peer.store)
            };
            match cells.iter_mut().find(is_same) {
                Some(cell) => cell.push(at),
                None => cells.push(vec![at]),
            }
        }
        Self { peers, cells }
    }

    /// Returns the roster with these peers instead. One that stays keeps its index; at most [`MAX_LEARNED`] are taken.
    pub(crate) fn with_peers(&self, wanted: &[PeerConfig]) -> (Self, PeerChanges) {
        let mut changes = PeerChanges::default();
        let mut peers = self.peers.clone();
        for (at, slot) in peers.iter_mut().enumerate() {
            if slot.as_ref().is_some_and(|peer| !wanted.contains(peer)) {
                *slot = None;
                changes.removed.push(at);
            }
        }
        for peer in wanted {
            if peers.iter().flatten().any(|known| known == peer) {
                continue;
            }
            // Not an index that was another's a moment ago: its link may still be closing.
            let is_free = |at: &usize| peers[*at].is_none() && !changes.removed.contains(at);
            let at = (0..peers.len()).find(is_free).unwrap_or(peers.len());
            if at >= MAX_LEARNED {
                break;
            }
            match peers.get_mut(at) {
                Some(slot) => *slot = Some(peer.clone()),
                None => peers.push(Some(peer.clone())),
            }
            changes.added.push((at, peer.clone()));
        }
        (Self::new(peers), changes)
    }

    pub(crate) fn get(&self, peer: usize) -> Option<&PeerConfig> {
        self.peers.get(peer).and_then(Option::as_ref)
    }

    /// Returns the indexes of all peers.
    pub(crate) fn indexes(&self) -> impl Iterator<Item = usize> {
        self.peers.iter().enumerate().filter_map(|(at, peer)| peer.is_some().then_some(at))
    }

    /// Returns the region of a peer.
    pub(crate) fn region(&self, peer: usize) -> &str {
        self.get(peer).map_or("", |peer| &peer.region)
    }

    /// Returns the region of another cell.
    pub(crate) fn region_of(&self, cell: &[usize]) -> &str {
        cell.first().map_or("", |peer| self.region(*peer))
    }

    /// Returns whether another cell is of this region.
    pub(crate) fn has_region(&self, name: &str) -> bool {
        self.cells.iter().any(|cell| self.region_of(cell) == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without it a peer's consumption goes to the outbox of another, or a peer that stays is linked anew for nothing.
    #[test]
    fn a_peer_keeps_its_index_for_as_long_as_it_is_there() {
        let peer = |name: &str| PeerConfig::new(name, name);
        let (roster, changes) = Roster::default().with_peers(&[peer("a"), peer("b")]);
        assert_eq!(changes.added, [(0, peer("a")), (1, peer("b"))]);
        let (roster, changes) = roster.with_peers(&[peer("b"), peer("c")]);
        assert_eq!((changes.added, changes.removed), (vec![(2, peer("c"))], vec![0]));
        let (roster, changes) = roster.with_peers(&[peer("c"), peer("b"), peer("d")]);
        assert_eq!((changes.added, changes.removed), (vec![(0, peer("d"))], vec![]));
        assert_eq!(roster.with_peers(&[peer("d"), peer("b"), peer("c")]).1, PeerChanges::default());
        let many: Vec<PeerConfig> = (0..400).map(|at| peer(&at.to_string())).collect();
        let (roster, changes) = roster.with_peers(&many);
        assert!(changes.added.len() <= MAX_LEARNED && roster.cells.len() == changes.added.len());
        let (roster, _) = roster.with_peers(&[]);
        assert!(roster.cells.is_empty() && roster.indexes().next().is_none());
    }
}
