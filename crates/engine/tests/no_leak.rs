//! A check keeps no memory: the plan of most requests is forgotten instead of dropped, which would leak what it owns on each check of
//! a program that runs for months.

mod rig;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use tollgate_engine::Check;
use tollgate_rules::{Descriptor, parse_inline_period};
use tollgate_testing::allocations::{CountingAllocator, allocations, bytes_kept};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Checks a hundred times after a first few, which put the thread's own state in place.
fn assert_keeps_nothing(rig: &rig::Rig, check: &Check<'_>, limits: usize, allocates: bool) {
    let run = || match pin!(rig.limiter.check(check)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(decision) => {
            assert!(decision.is_allowed());
            assert_eq!(decision.limits.len(), limits);
        }
        Poll::Pending => panic!("memory answers at once"),
    };
    (0..3).for_each(|_| run());
    assert_eq!(bytes_kept(|| (0..100).for_each(|_| run())), 0, "{limits} limits");
    // Else it would show nothing.
    assert!(allocations(run) > 0 || !allocates, "{limits} limits");
}

#[test]
fn checks_of_more_limits_than_a_plan_has_room_for_keep_nothing() {
    const NINE: [&str; 9] = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
    let rules: String =
        NINE.iter().map(|key| format!("  - {{key: {key}, limit: 1000000/second}}\n")).collect();
    let rig = rig::rig(&format!("domain: d\ndescriptors:\n{rules}"));
    let attributes = NINE.map(|key| (key, "v"));
    for count in [1, 9] {
        let check = Check::attributes("d", &attributes[..count]);
        assert_keeps_nothing(&rig, &check, count, count > 1);
    }
    let entries = [("a", "v")];
    let five = [Descriptor { entries: &entries, ..Descriptor::default() }; 5];
    for count in [4, 5] {
        assert_keeps_nothing(&rig, &Check::descriptors("d", &five[..count]), count, count > 4);
    }
}

#[test]
fn checks_with_an_inline_limit_keep_nothing() {
    let rig = rig::rig("domain: d\ndescriptors:\n  - {key: a, limit: 1000000/second}\n");
    let entries = [("a", "v")];
    let period = parse_inline_period("second").expect("a period");
    let descriptors =
        [Descriptor { entries: &entries, limit: Some((1_000_000, period)), ..Descriptor::default() }];
    assert_keeps_nothing(&rig, &Check::descriptors("d", &descriptors), 1, true);
}
