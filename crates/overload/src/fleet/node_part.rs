//! A node's equal part of the fleet's capacity: at least that much is shared out among the tenants of a node, so that a node whose callers
//! ask for less is not outbid by others.
//!
//! Shares are counted in units per second; a request of several units has as many places. A part in flight becomes a rate by how long requests last (Little's law): the places that
//! were held, integrated over time, divided by those that have been left. The rate at which requests begin says nothing about
//! that: a node that finds no room begins none. A node that has less than [`SCANT`] of its part shares out without bound, because what it is
//! owed is more than any of its tenants can have taken from the others. One that has more than its part shares out a little less than it
//! gets ([`CEDED`]): places become free one by one, and where both sides ask for them at once, those that are owed them are to find them.

/// A node's part of the capacity, if all nodes had the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NodePart {
    /// How many nodes there are is unknown: the node shares out what it gets.
    Unknown,
    /// All of the capacity is this node's. It shares out what it gets; a tenant without others beside it has no share to stay within.
    Whole,
    /// Units per second.
    Rate(f64),
    /// Places in flight.
    InFlight {
        /// Number of places.
        places: f64,
        /// What the node's requests hold.
        held: NodePlaces,
    },
}

/// Places that the requests of a node hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum NodePlaces {
    /// The end of requests is reported.
    Reported {
        /// Number of places that are held.
        now: u64,
        /// Number of places that have ever been taken.
        begun: u64,
    },
    /// It is not: requests count as in flight for so many seconds.
    Lasting(f64),
}

/// Part of its places below which a node shares out without bound.
const SCANT: f64 = 0.5;
/// Time constant of how long requests last, in seconds.
const MEMORY: f64 = 5.0;
/// Part of what it gets that a node with more than its part of the places does not share out.
const CEDED: f64 = 0.1;
/// A level that no demand reaches.
const UNBOUNDED: f64 = 1e9;

/// How long the requests of a node last.
#[derive(Debug, Default)]
pub(super) struct Durations {
    /// Places held times seconds, and places that were left, fading.
    held: f64,
    ended: f64,
    last: Option<(u64, u64)>,
}

impl Durations {
    /// Ends a control interval of this length in seconds, in which so many units per second were admitted. Returns the units per
    /// second that are shared out.
    pub(super) fn shared_out(&mut self, part: NodePart, length: f64, admitted: f64) -> f64 {
        let (rate, has_more) = match part {
            NodePart::Unknown | NodePart::Whole => return admitted,
            NodePart::Rate(rate) => return admitted.max(rate),
            NodePart::InFlight { places, held: NodePlaces::Lasting(seconds) } => {
                let rate = places / seconds.max(1e-3);
                (rate, admitted > rate)
            }
            NodePart::InFlight { places, held: NodePlaces::Reported { now, begun } } => {
                self.count(now, begun, length);
                // All that is admitted are reservations, whose ends are reported to any node.
                if begun == 0 && admitted > 0.0 {
                    return admitted;
                }
                let now = now as f64;
                if now < places * SCANT || (self.ended < 1.0 && now < places) {
                    return UNBOUNDED;
                }
                (if self.held > 0.0 { places * self.ended / self.held } else { 0.0 }, now > places)
            }
        };
        rate.max(if has_more { admitted * (1.0 - CEDED) } else { admitted })
    }

    fn count(&mut self, now: u64, begun: u64, length: f64) {
        if let Some((before, known)) = self.last.replace((now, begun)) {
            let ended = (begun - known.min(begun)) as f64 + before as f64 - now as f64;
            let keep = (-length / MEMORY).exp();
            self.held = self.held * keep + f64::midpoint(before as f64, now as f64) * length;
            self.ended = self.ended * keep + ended.max(0.0);
        }
    }
}
