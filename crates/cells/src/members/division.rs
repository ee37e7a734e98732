//! How a limit is divided while cells are silent: the part of this cell's side.
//!
//! Sides are disjoint, but no cell knows the others' sides. So a part depends on the configured cells, their weights and
//! the key alone, and the parts of all sides sum to the limit at most, whatever the sides are:
//!
//! - Each cell has a part in whole units, and a side has those of its cells. The parts of all cells sum to the limit
//!   exactly: the remainders go to cells that a hash of the key selects.
//! - Of a limit so small that some cell's part is less than a unit, a side has its weight's part rounded down, and the
//!   side with more than half of all weight what the others cannot have, which is its part rounded up. By the first rule a
//!   dead cell would keep its callers' only unit.

use super::Members;
use std::collections::BTreeSet;
use std::sync::PoisonError;
use tollgate_core::{Limit, Timestamp};

/// Weights of all cells, and which of them are on this cell's side.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Division {
    /// In an order that all cells agree on, if `is_ordered`.
    cells: Vec<(u64, Side)>,
    is_ordered: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Own,
    Other,
}

/// The share of a cell that decides by whole limits: shares are in millionths.
pub(crate) const WHOLE: u64 = 1_000_000;

impl Division {
    /// Returns the weight of this cell's side, and of all cells.
    pub(crate) fn weights(&self) -> (u64, u64) {
        let own = self.cells.iter().filter(|(_, side)| *side == Side::Own);
        (own.map(|(weight, _)| weight).sum(), self.cells.iter().map(|(weight, _)| weight).sum())
    }

    /// Returns the part of a key's limit.
    pub(crate) fn part(&self, limit: &Limit, hash: u64) -> Limit {
        limit.part(|units| self.units(units, hash))
    }

    fn units(&self, units: u64, hash: u64) -> u64 {
        let (own, all) = self.weights();
        let (own, all, whole) = (u128::from(own), u128::from(all), u128::from(units));
        if own == all {
            return if all == 0 { 0 } else { units };
        }
        let smallest = self.cells.iter().map(|(weight, _)| *weight).filter(|weight| *weight > 0).min();
        let part = if whole * u128::from(smallest.unwrap_or(0)) < all {
            let has_rest = 2 * own > all || 2 * own == all && self.has_rest_of_halves(hash);
            (whole * own + if has_rest { all - 1 } else { 0 }) / all
        } else {
            let offset = if self.is_ordered { u128::from(hash) % all } else { 0 };
            let (mut before, mut part) = (0, 0);
            for (weight, side) in &self.cells {
                let through = before + u128::from(*weight);
                if *side == Side::Own {
                    part += match self.is_ordered {
                        true => (whole * through + offset) / all - (whole * before + offset) / all,
                        false => whole * u128::from(*weight) / all,
                    };
                }
                before = through;
            }
            part
        };
        u64::try_from(part).unwrap_or(0)
    }

    /// Returns whether this side has the odd unit of two equal sides.
    fn has_rest_of_halves(&self, hash: u64) -> bool {
        let at = usize::try_from(hash % self.cells.len().max(1) as u64).unwrap_or(0);
        self.is_ordered && self.cells.get(at).is_some_and(|(_, side)| *side == Side::Own)
    }
}

impl Members {
    /// Returns the part of a limit by which this cell decides, and the whole: all if every cell answers and has had an
    /// answer of this one, else the weight of the cells that answer if all of them miss the same ones, else this cell's
    /// own.
    #[must_use]
    pub fn share(&self, now: Timestamp) -> (u64, u64) {
        self.division(now).weights()
    }

    /// Returns how limits are divided.
    pub(crate) fn division(&self, now: Timestamp) -> Division {
        let roster = self.roster.load();
        let answering: Vec<(&str, Option<usize>)> = roster
            .cells
            .iter()
            .map(|cell| (roster.region_of(cell), self.answering_node(cell, now)))
            .collect();
        // A cell that does not reach this one does not report to it, and decides by its part.
        let is_whole = answering.iter().all(|(_, node)| node.is_some_and(|node| self.has_answered(node)));
        let is_agreed = is_whole || self.is_agreed(now);
        let mut regions: Vec<(&str, u32)> = Vec::new();
        for region in answering.iter().map(|(region, _)| *region).chain([self.config.region.as_str()]) {
            match regions.iter_mut().find(|(known, _)| *known == region) {
                Some((_, cells)) => *cells += 1,
                None => regions.push((region, 1)),
            }
        }
        regions.sort_unstable();
        let mut cells = Vec::new();
        for (region, count) in regions {
            let weight = self.cell_weight(region, count);
            cells.extend((0..count).map(|rank| ((region, rank), (weight, Side::Other))));
        }
        // A cell whose index is not one of its region's, as with learned cells, takes the next that is free: then the
        // order is not that of other cells.
        let mut is_ordered = !self.config.learns_peers;
        let mut take = |region: &str, rank: Option<u32>| {
            let is_free = |(name, _): (&str, u32), side: Side| name == region && side == Side::Other;
            let exact =
                cells.iter().position(|(slot, (_, side))| is_free(*slot, *side) && Some(slot.1) == rank);
            is_ordered &= exact.is_some();
            let at = exact.or_else(|| cells.iter().position(|(slot, (_, side))| is_free(*slot, *side)));
            if let Some(at) = at {
                cells[at].1.1 = Side::Own;
            }
        };
        // The part of a displaced process is that of the other one.
        if !self.is_displaced(now) {
            take(&self.config.region, Some(self.config.rank));
            for (region, node) in answering.into_iter().filter(|_| is_agreed) {
                if let Some(node) = node {
                    take(region, self.hello(node).map(|hello| hello.rank));
                }
            }
        }
        Division { cells: cells.into_iter().map(|(_, cell)| cell).collect(), is_ordered }
    }

    /// Returns whether a peer has had an answer of this cell, as it last said.
    fn has_answered(&self, peer: usize) -> bool {
        let view = self.peers[peer].view.lock().unwrap_or_else(PoisonError::into_inner);
        view.contains(&self.config.cell)
    }

    /// Returns the weight of each cell of a region, which are this many.
    fn cell_weight(&self, region: &str, cells: u32) -> u64 {
        if self.config.weights.is_empty() {
            return 1_000;
        }
        let given = self.config.weights.iter().find(|(name, _)| name == region).map(|(_, weight)| *weight);
        // A region's weight is divided among its cells; a thousandth is fine enough.
        given.unwrap_or(0) * 1_000 / u64::from(cells.max(1))
    }

    /// Returns whether all cells that answer are in touch with the same cells as this one. Then no cell outside counts
    /// one of them as its own side.
    fn is_agreed(&self, now: Timestamp) -> bool {
        let roster = self.roster.load();
        let answering: Vec<usize> =
            roster.cells.iter().filter_map(|cell| self.answering_node(cell, now)).collect();
        let name = |peer: &usize| self.hello(*peer).map(|hello| hello.cell.clone());
        let Some(mut names) = answering.iter().map(name).collect::<Option<BTreeSet<String>>>() else {
            return false;
        };
        names.insert(self.config.cell.clone());
        answering.iter().all(|peer| {
            let view = self.peers[*peer].view.lock().unwrap_or_else(PoisonError::into_inner);
            view.iter().cloned().chain(name(peer)).collect::<BTreeSet<String>>() == names
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `with` on each way to divide this many cells into sides, as the side of each cell.
    fn partitions(cells: usize, with: &mut dyn FnMut(&[usize])) {
        fn next(sides: &mut Vec<usize>, cells: usize, with: &mut dyn FnMut(&[usize])) {
            if sides.len() == cells {
                return with(sides);
            }
            for side in 0..=sides.iter().max().map_or(0, |last| last + 1) {
                sides.push(side);
                next(sides, cells, with);
                sides.pop();
            }
        }
        next(&mut Vec::new(), cells, with);
    }

    fn of(weights: &[u64], sides: &[usize], own: usize, is_ordered: bool) -> Division {
        let side = |at: usize| if sides[at] == own { Side::Own } else { Side::Other };
        Division {
            cells: weights.iter().enumerate().map(|(at, weight)| (*weight, side(at))).collect(),
            is_ordered,
        }
    }

    /// Without it the cells of a cut network admit more than the limit, or lose the remainders.
    #[test]
    fn the_parts_of_all_sides_sum_to_the_limit_whatever_the_sides_are() {
        for weights in
            [&[1_000; 2][..], &[1_000; 3], &[1_000; 5], &[2_000, 1_000, 500, 500], &[7_000, 0, 1_333]]
        {
            let all: u64 = weights.iter().sum();
            for units in (0..40).chain([90, 999, 1_000_000_007]) {
                for hash in (0..50_u64).map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) {
                    partitions(weights.len(), &mut |sides| {
                        let last = sides.iter().max().map_or(0, |last| *last);
                        let parts = |is_ordered: &dyn Fn(usize) -> bool| -> u64 {
                            (0..=last)
                                .map(|own| of(weights, sides, own, is_ordered(own)).units(units, hash))
                                .sum()
                        };
                        let sum = parts(&|_| true);
                        let smallest =
                            weights.iter().filter(|weight| **weight > 0).min().map_or(0, |one| *one);
                        let is_large = units * smallest >= all;
                        assert!(sum <= units && (sum == units || !is_large), "{weights:?} {units} {sides:?}");
                        // Where one does not know the order of the others.
                        assert!(parts(&|own| own != 0) <= units, "{weights:?} {units} {sides:?}");
                        let weight = |own: usize| -> u64 {
                            (0..weights.len()).filter(|at| sides[*at] == own).map(|at| weights[at]).sum()
                        };
                        let most = (0..=last).find(|own| 2 * weight(*own) > all);
                        if let Some(most) = most.filter(|_| units > 0) {
                            let part = of(weights, sides, most, true).units(units, hash);
                            assert!(part > 0, "a dead cell denies {weights:?} {units} {sides:?}");
                        }
                    });
                }
            }
        }
    }

    /// Without it the same cell has the remainders of all callers.
    #[test]
    fn remainders_are_spread_over_the_cells_by_key() {
        let parts = |own: usize| -> u64 {
            let division = of(&[1_000; 3], &[0, 1, 2], own, true);
            (0..3_000_u64).map(|at| division.units(4, at.wrapping_mul(0x9e37_79b9_7f4a_7c15))).sum()
        };
        let parts = [parts(0), parts(1), parts(2)];
        assert_eq!(parts.iter().sum::<u64>(), 12_000);
        assert!(parts.iter().all(|part| (3_900..4_100).contains(part)), "{parts:?}");
    }
}
