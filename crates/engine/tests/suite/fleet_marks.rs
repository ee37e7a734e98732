//! A guarantee or a reserve that was found used up is left alone for a moment, never at the expense of requests that would find room.

use crate::rig::{Rig, rig};
use tollgate_core::TimeDelta;
use tollgate_engine::{Check, HeldPermits, ReservationId};

fn admit(rig: &Rig, attributes: &[(&str, &str)]) -> (bool, Option<HeldPermits>) {
    let (decision, held) = pollster::block_on(rig.limiter.admit(&Check::attributes("d", attributes)));
    (decision.is_allowed(), held)
}

fn release(rig: &Rig, held: &HeldPermits) {
    pollster::block_on(rig.limiter.release(held)).expect("memory");
}

const GREEDY: [(&str, &str); 1] = [("tenant", "greedy")];
const ACME: [(&str, &str); 2] = [("tenant", "acme"), ("tier", "enterprise")];
const LOUD: [(&str, &str); 2] = [("tenant", "loud"), ("path", "/pay")];
const POLITE: [(&str, &str); 2] = [("tenant", "polite"), ("path", "/pay")];

/// A tenant that asks for more than its share must not take from others what is reserved for them, and free.
#[test]
fn a_loud_tenant_does_not_close_a_reserve_with_free_places() {
    let rig = rig("
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 40 in flight, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 25% each}}
");
    let held: Vec<_> = (0..32).filter_map(|_| admit(&rig, &GREEDY).1).collect();
    let own: Vec<_> = (0..10).filter_map(|_| admit(&rig, &ACME).1).collect();
    assert_eq!((held.len(), own.len()), (32, 10), "all but what is reserved, and the guarantee");
    let (mut loud, mut polite) = (Vec::new(), Vec::new());
    let (mut sent, mut served, mut shed) = (0, 0, 0);
    for ms in 0..6_000 {
        for calls in [&mut loud, &mut polite] {
            for (_, ended) in calls.extract_if(.., |(until, _)| *until <= ms) {
                release(&rig, &ended);
            }
        }
        match admit(&rig, &LOUD) {
            (true, permits) => loud.extend(permits.map(|permits| (ms + 50, permits))),
            (false, _) => shed += 1,
        }
        if ms % 100 == 50 {
            let is_free = loud.len() < 8;
            let (is_served, permits) = admit(&rig, &POLITE);
            polite.extend(permits.map(|permits| (ms + 10, permits)));
            // Its share is known after some time.
            if ms > 2_000 && is_free {
                sent += 1;
                served += u32::from(is_served);
            }
        }
        rig.clock.advance(TimeDelta::from_millis(1));
    }
    assert!(shed > 3_000, "{shed} of the loud tenant's are beyond the reserve");
    assert!(sent > 30, "{sent}");
    assert_eq!(served, sent, "a place is free for those within their shares");
}

/// The same of a rate: tenants that ask for little of what is reserved have all of it.
#[test]
fn a_loud_tenant_does_not_close_a_reserved_rate() {
    let rig = rig("
domain: d
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 50/second, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 40% each}}
");
    let other = [("tenant", "other"), ("tier", "enterprise")];
    let senders: [(&[(&str, &str)], u64); 5] =
        [(&GREEDY, 60), (&ACME, 30), (&other, 30), (&LOUD, 100), (&POLITE, 2)];
    let (mut sent, mut served) = (0, 0);
    for ms in 0..20_000_u64 {
        for (attributes, rate) in senders {
            // At different moments.
            if (ms + rate * 7) * rate % 1_000 >= rate {
                continue;
            }
            let (is_served, _) = admit(&rig, attributes);
            if attributes == POLITE && ms > 5_000 {
                sent += 1;
                served += u32::from(is_served);
            }
        }
        rig.clock.advance(TimeDelta::from_millis(1));
    }
    assert!(sent >= 28 && served + 1 >= sent, "{served} of {sent}");
}

/// Calls of a tenant for a second, of 4 ms each, by so many clients that call again at once. Returns how many were served.
fn calls(rig: &Rig, clients: usize, by_reservation: bool) -> u32 {
    let mut held: Vec<(u64, Call)> = Vec::new();
    let mut served = 0;
    for ms in 0..1_000 {
        for (_, ended) in held.extract_if(.., |(until, _)| *until <= ms) {
            ended.end(rig);
        }
        // A client that is shed tries again after a moment.
        for _ in held.len()..clients {
            if let Some(call) = Call::begin(rig, by_reservation) {
                held.push((ms + 4, call));
                served += 1;
            }
        }
        rig.clock.advance(TimeDelta::from_millis(1));
    }
    held.into_iter().for_each(|(_, call)| call.end(rig));
    served
}

enum Call {
    Admitted(HeldPermits),
    Reserved(ReservationId),
}

impl Call {
    fn begin(rig: &Rig, by_reservation: bool) -> Option<Self> {
        if !by_reservation {
            return admit(rig, &ACME).1.map(Self::Admitted);
        }
        let check = Check::attributes("d", &ACME);
        let reserved = pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), None));
        reserved.expect("kept").id.map(Self::Reserved)
    }

    fn end(self, rig: &Rig) {
        match self {
            Self::Admitted(held) => release(rig, &held),
            Self::Reserved(id) => _ = pollster::block_on(rig.limiter.settle(id, 1)).expect("open"),
        }
    }
}

/// One request too many must not cost a tenant the guarantee that it has.
#[test]
fn a_tenant_beyond_its_guarantee_has_all_of_it() {
    for by_reservation in [false, true] {
        let rig = rig("
domain: d
overload:
  fleet: {capacity: 20 in flight}
  fairness: {by: tenant, guarantees: {enterprise: 25% each}}
");
        let greedy: Vec<_> = (0..20).filter_map(|_| admit(&rig, &GREEDY).1).collect();
        assert_eq!(greedy.len(), 20, "the whole capacity");
        for clients in [5, 6, 8, 40] {
            assert_eq!(calls(&rig, clients, by_reservation), 1_250, "{clients} clients, five at once");
        }
    }
}
