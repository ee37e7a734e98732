//! Who may be connected to the admin address at once. Operators are few, so connections are; and yet nobody takes all of them:
//!
//! - One place (an address, or the /64 of an IPv6 one) has a part of them, so that others get in whatever it does.
//! - Where there are as many as there may be, of the place or of all, somebody gives way to who comes: first those who have
//!   sent nothing, then those whom nobody has let in, then those who were let in and ask for nothing just now; of each kind
//!   whoever has been quiet for longest. Who was let in and is being answered stays.
//! - Who comes and asks for nothing is not waited for as long as who has asked before.
//!
//! To let them wait to be accepted was rejected: whoever holds connections that do nothing would decide how long that is.

use super::attempts::prefix;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Connections at once.
const ALL: usize = 512;
/// Those of one place.
pub(super) const PLACE: usize = 256;
/// How long the first request of a connection may take to arrive, the handshake included.
const FIRST: Duration = Duration::from_secs(5);

/// What is known of somebody who is connected, in the order in which they give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    /// Has sent nothing, or not yet all of a head.
    Silent,
    /// Has asked for something that anybody may, or was refused.
    Stranger,
    /// Was let in by a token, a session or a certificate.
    LetIn,
}

#[derive(Debug)]
struct Sitter {
    place: IpAddr,
    standing: Standing,
    /// Answers under way.
    answers: u32,
    /// Counts up with everything that anybody does.
    last_heard: u64,
    leave: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Table {
    sitters: HashMap<u64, Sitter>,
    clock: u64,
}

impl Table {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Makes somebody leave of those who are meant; says whether anybody could.
    fn push_out(&mut self, meant: impl Fn(&Sitter) -> bool) -> bool {
        let movable = |sitter: &Sitter| sitter.standing < Standing::LetIn || sitter.answers == 0;
        let all = self.sitters.iter().filter(|(_, sitter)| meant(sitter) && movable(sitter));
        let first =
            all.min_by_key(|(_, sitter)| (sitter.standing, sitter.last_heard)).map(|(number, _)| *number);
        let gone = first.and_then(|number| self.sitters.remove(&number));
        gone.inspect(|gone| gone.leave.notify_one()).is_some()
    }
}

/// All that there are.
#[derive(Debug, Default)]
pub(super) struct Seats(Arc<Mutex<Table>>);

fn locked(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Seats {
    /// For somebody who has come; nothing, where nobody can give way.
    pub(super) fn take(&self, peer: IpAddr) -> Option<Seat> {
        let place = prefix(peer);
        let mut table = locked(&self.0);
        let here = table.sitters.values().filter(|sitter| sitter.place == place).count();
        let is_free = match (here >= PLACE, table.sitters.len() >= ALL) {
            (true, _) => table.push_out(|sitter| sitter.place == place),
            (false, true) => table.push_out(|_| true),
            (false, false) => true,
        };
        if !is_free {
            return None;
        }
        let (number, leave) = (table.tick(), Arc::new(Notify::new()));
        let sitter = Sitter {
            place,
            standing: Standing::Silent,
            answers: 0,
            last_heard: number,
            leave: Arc::clone(&leave),
        };
        table.sitters.insert(number, sitter);
        Some(Seat { table: Arc::clone(&self.0), number, leave })
    }
}

/// One, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    table: Arc<Mutex<Table>>,
    number: u64,
    leave: Arc<Notify>,
}

impl Seat {
    fn change(&self, change: impl FnOnce(&mut Sitter)) {
        let mut table = locked(&self.table);
        let now = table.tick();
        if let Some(sitter) = table.sitters.get_mut(&self.number) {
            sitter.last_heard = now;
            change(sitter);
        }
    }

    /// A request has come; its answer is under way until what is returned is dropped.
    pub(super) fn answering(self: &Arc<Self>) -> Answering {
        self.change(|sitter| {
            sitter.standing = sitter.standing.max(Standing::Stranger);
            sitter.answers += 1;
        });
        Answering(Arc::clone(self))
    }

    /// Whoever asks has proven who they are.
    pub(super) fn let_in(&self) {
        self.change(|sitter| sitter.standing = Standing::LetIn);
    }

    /// Comes when it is to be given up.
    pub(super) async fn given_up(&self) {
        tokio::select! {
            () = self.leave.notified() => return,
            () = tokio::time::sleep(FIRST) => {}
        }
        if !self.is_silent() {
            self.leave.notified().await;
        }
    }

    fn is_silent(&self) -> bool {
        let table = locked(&self.table);
        table.sitters.get(&self.number).is_none_or(|sitter| sitter.standing == Standing::Silent)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        locked(&self.table).sitters.remove(&self.number);
    }
}

/// An answer under way.
#[derive(Debug)]
pub(super) struct Answering(Arc<Seat>);

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.change(|sitter| sitter.answers = sitter.answers.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number).expect("an address")))
    }

    fn seat(seats: &Seats, from: IpAddr) -> Arc<Seat> {
        Arc::new(seats.take(from).expect("a seat"))
    }

    fn stays(seat: &Seat) -> bool {
        locked(&seat.table).sitters.contains_key(&seat.number)
    }

    /// Takes all seats, by addresses that others than `address(0)` have.
    fn full(seats: &Seats) -> Vec<Arc<Seat>> {
        let taken = locked(&seats.0).sitters.len();
        (taken..ALL).map(|i| seat(seats, address(1 + i / PLACE))).collect()
    }

    #[test]
    fn one_place_never_takes_all() {
        let seats = Seats::default();
        let six = |last: u16| -> IpAddr { format!("2001:db8::{last:x}").parse().expect("an address") };
        let held: Vec<_> = (0..600).map(|i| seat(&seats, six(i))).collect();
        assert_eq!(held.iter().filter(|held| stays(held)).count(), PLACE, "of one /64");
        assert!(held[600 - PLACE..].iter().all(|held| stays(held)), "the oldest have left");
        let other = seat(&seats, address(0));
        assert!(stays(&other) && stays(&held[600 - PLACE]), "and for others nobody had to");
        drop(held);
        assert_eq!(locked(&seats.0).sitters.len(), 1);
    }

    #[test]
    fn those_who_ask_for_nothing_give_way_first() {
        let seats = Seats::default();
        let served = seat(&seats, address(0));
        let answer = served.answering();
        served.let_in();
        let idle = seat(&seats, address(0));
        drop(idle.answering());
        idle.let_in();
        let stranger = seat(&seats, address(0));
        let asks = stranger.answering();
        let silent = full(&seats);
        let mut came = Vec::new();
        let mut come = |many: usize| {
            for _ in 0..many {
                let new = seat(&seats, address(1_000 + came.len()));
                drop(new.answering());
                new.let_in();
                came.push(new);
            }
        };
        come(1);
        assert!(!stays(&silent[0]) && silent[1..].iter().all(|one| stays(one)), "the oldest of the silent");
        come(silent.len() - 1);
        assert!(!silent.iter().any(|one| stays(one)) && stays(&stranger));
        come(1);
        assert!(!stays(&stranger) && stays(&idle), "an answer that anybody may have protects nobody");
        come(1);
        assert!(!stays(&idle) && stays(&served));
        come(2 * ALL);
        assert!(stays(&served), "who was let in and is being answered stays");
        drop((answer, asks));
        come(ALL);
        assert!(!stays(&served));
    }

    #[test]
    fn where_nobody_can_give_way_nobody_comes() {
        let seats = Seats::default();
        let mut held: Vec<_> = (0..PLACE)
            .map(|_| {
                let seat = seat(&seats, address(0));
                let answer = seat.answering();
                seat.let_in();
                (seat, answer)
            })
            .collect();
        assert!(seats.take(address(0)).is_none());
        assert!(seats.take(address(1)).is_some());
        drop(held.pop());
        assert!(seats.take(address(0)).is_some());
    }
}
