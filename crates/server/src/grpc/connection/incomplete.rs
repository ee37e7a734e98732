//! Messages that have not arrived completely: how many bytes of them a connection collects, and which streams may send more.
//!
//! As long as there is room, each stream gets its window back as it sends. Beyond it one stream at a time does, the favored one,
//! so that one message after another is completed and makes room. A client may be unable to send just that one: what a proxy
//! reads from its own client can begin with the part of another message. So when no message is completed for a while, there is
//! room for twice as many bytes, up to a maximum. Beyond that the stream that has sent nothing for the longest time is given up.
//!
//! Rejected: rejecting messages as soon as there is no room, because a proxy that fails open would let their requests pass; and
//! giving up the largest, which is that of an honest client when many small ones are left half sent.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// How many bytes are collected before streams wait for each other.
pub(super) const ROOM: usize = 8 << 20;
/// How many bytes are collected at most.
pub(super) const MAX_ROOM: usize = 64 << 20;
/// There is more room when streams have waited for this long and no message was completed.
pub(super) const STALL: Duration = Duration::from_millis(100);

/// The messages of a connection that have not arrived completely.
#[derive(Debug)]
pub(super) struct Incomplete {
    parts: BTreeMap<u32, Part>,
    /// Bytes of all parts, and of the heads that are kept until their messages have arrived.
    bytes: usize,
    room: usize,
    /// The stream that may go on although there is no room, and those that may not, in their order.
    favored: Option<u32>,
    held: VecDeque<u32>,
    /// A message was completed or given up since the last stall.
    has_ended: bool,
    /// Number of parts that have arrived.
    arrivals: u64,
}

/// What has arrived of a message.
#[derive(Debug, Default)]
struct Part {
    bytes: usize,
    /// Bytes that the stream may not send again yet.
    held: usize,
    /// Which arrival was the last.
    arrival: u64,
}

impl Incomplete {
    pub(super) fn new() -> Self {
        Self {
            parts: BTreeMap::new(),
            bytes: 0,
            room: ROOM,
            favored: None,
            held: VecDeque::new(),
            has_ended: false,
            arrivals: 0,
        }
    }

    /// Counts a head that is kept until its message has arrived.
    pub(super) const fn add_head(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// Counts a part of a message. Returns how many bytes the stream may send again at once.
    pub(super) fn add(&mut self, stream: u32, bytes: usize) -> usize {
        self.bytes += bytes;
        let part = self.parts.entry(stream).or_default();
        part.bytes += bytes;
        if bytes == 0 {
            return 0;
        }
        self.arrivals += 1;
        part.arrival = self.arrivals;
        if self.bytes <= self.room || *self.favored.get_or_insert(stream) == stream {
            return bytes;
        }
        if part.held == 0 {
            self.held.push_back(stream);
        }
        part.held += bytes;
        // Those that were given up would be remembered until there is room.
        if self.held.len() > 2 * self.parts.len() + 64 {
            self.held.retain(|stream| self.parts.contains_key(stream));
        }
        0
    }

    /// Counts a message off that is complete or given up, and its head. What [`Self::next`] returns may go on.
    pub(super) fn remove(&mut self, stream: u32, head: usize) {
        self.bytes -= head;
        // Nearly all messages arrive in one part.
        if self.parts.is_empty() {
            return;
        }
        let Some(part) = self.parts.remove(&stream) else { return };
        self.bytes -= part.bytes;
        self.has_ended = true;
        if self.favored == Some(stream) {
            self.favored = None;
        }
        if self.bytes <= ROOM {
            self.room = ROOM;
        }
    }

    /// Returns a stream that may go on, and how many bytes it may send again.
    pub(super) fn next(&mut self) -> Option<(u32, usize)> {
        while self.bytes <= self.room || self.favored.is_none() {
            let stream = self.held.pop_front()?;
            let Some(part) = self.parts.get_mut(&stream) else { continue };
            if self.bytes > self.room {
                self.favored = Some(stream);
            }
            return Some((stream, std::mem::take(&mut part.held)));
        }
        None
    }

    /// Returns whether a stream waits for another.
    pub(super) fn is_waiting(&self) -> bool {
        !self.held.is_empty()
    }

    /// Makes more room if no message was completed since the last call. What [`Self::next`] returns may go on.
    pub(super) fn on_stall(&mut self) {
        if !std::mem::take(&mut self.has_ended) {
            self.room = (2 * self.room).min(MAX_ROOM);
        }
    }

    /// Returns the stream to give up because too many bytes are collected: the one that has sent nothing for the longest time.
    pub(super) fn excess(&self) -> Option<u32> {
        let oldest = || self.parts.iter().min_by_key(|(_, part)| part.arrival);
        if self.bytes > MAX_ROOM { oldest().map(|(stream, _)| *stream) } else { None }
    }

    /// Frees memory that earlier messages have needed.
    pub(super) fn shrink(&mut self) {
        self.held.shrink_to_fit();
    }

    #[cfg(test)]
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: usize = 64 << 10;

    /// Streams that have each sent one window of a message, beyond the room for them.
    fn stalled() -> (Incomplete, u32) {
        let mut incomplete = Incomplete::new();
        let mut stream = 1;
        while incomplete.bytes <= ROOM {
            incomplete.add(stream, WINDOW);
            stream += 2;
        }
        (incomplete, stream)
    }

    fn all_next(incomplete: &mut Incomplete) -> Vec<(u32, usize)> {
        std::iter::from_fn(|| incomplete.next()).collect()
    }

    /// Without room one message after another is completed.
    #[test]
    fn streams_go_on_one_at_a_time_when_there_is_no_room() {
        let (mut incomplete, next) = stalled();
        let favored = next - 2;
        for stream in (next..next + 10).step_by(2) {
            assert_eq!(incomplete.add(stream, WINDOW), 0, "it waits");
        }
        assert!(incomplete.is_waiting());
        assert_eq!(incomplete.add(favored, WINDOW), WINDOW);
        assert_eq!(all_next(&mut incomplete), []);
        incomplete.remove(favored, 0);
        assert_eq!(all_next(&mut incomplete), [(next, WINDOW)]);
        // What makes room lets all go on.
        for stream in (1..20).step_by(2) {
            incomplete.remove(stream, 0);
        }
        let rest: Vec<_> = (next + 2..next + 10).step_by(2).map(|stream| (stream, WINDOW)).collect();
        assert_eq!(all_next(&mut incomplete), rest);
        assert!(!incomplete.is_waiting());
    }

    /// A proxy that cannot send the favored message must be able to send another one.
    #[test]
    fn there_is_more_room_while_no_message_is_completed() {
        let (mut incomplete, next) = stalled();
        assert_eq!(incomplete.add(next, WINDOW), 0);
        incomplete.on_stall();
        assert_eq!(all_next(&mut incomplete), [(next, WINDOW)]);
        assert_eq!(incomplete.add(next, WINDOW), WINDOW, "up to twice as many bytes");
        let mut stream = next + 2;
        while incomplete.bytes <= 2 * ROOM {
            incomplete.add(stream, WINDOW);
            stream += 2;
        }
        assert_eq!(incomplete.add(1, WINDOW), 0);
        // A message that is completed is no stall.
        incomplete.remove(3, 0);
        incomplete.add(5, WINDOW);
        incomplete.add(7, WINDOW);
        let before = incomplete.room;
        incomplete.on_stall();
        assert_eq!(incomplete.room, before);
        for stream in (1..stream).step_by(2) {
            incomplete.remove(stream, 0);
        }
        assert_eq!((incomplete.bytes, incomplete.room), (0, ROOM), "and then as before");
    }

    /// What is collected has a bound, and streams that go on sending are not the ones that are given up.
    #[test]
    fn beyond_the_maximum_the_stream_that_is_silent_for_longest_is_given_up() {
        let mut incomplete = Incomplete::new();
        let mut stream = 1;
        while incomplete.excess().is_none() {
            incomplete.add(stream, WINDOW);
            incomplete.add(1, 1);
            stream += 2;
        }
        assert!(incomplete.bytes <= MAX_ROOM + WINDOW + 1);
        assert_eq!(incomplete.excess(), Some(3));
        incomplete.remove(3, 0);
        assert_eq!(incomplete.excess(), None);
    }

    /// Heads count too: they may be larger than the references that they were sent as.
    #[test]
    fn heads_are_counted_until_their_messages_arrive() {
        let mut incomplete = Incomplete::new();
        incomplete.add_head(4_000);
        incomplete.add_head(5_000);
        incomplete.add(3, 7);
        incomplete.remove(1, 4_000);
        assert_eq!(incomplete.bytes(), 5_007);
        incomplete.remove(3, 5_000);
        assert_eq!(incomplete.bytes(), 0);
    }

    #[test]
    fn streams_that_wait_are_remembered_once() {
        let (mut incomplete, next) = stalled();
        for _ in 0..1_000 {
            incomplete.add(next, 1);
            incomplete.add(next, 0);
        }
        assert_eq!(incomplete.remembered(), 1);
        for stream in (next + 2..next + 20_000).step_by(2) {
            incomplete.add(stream, 1);
            incomplete.remove(stream, 0);
        }
        assert!(incomplete.remembered() < 1_000, "{}", incomplete.remembered());
    }
}
