//! An allowed check allocates nothing, nor does a place at an upstream: a program that embeds the limiter pays no allocator on the path of each request.
//! Domains without load take little memory.

mod rig;

use rig::{Rig, rig};
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use tollgate_engine::{Check, Ended};
use tollgate_rules::Descriptor;
use tollgate_testing::allocations::{CountingAllocator, allocations, bytes_kept};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn now<T>(check: impl Future<Output = T>) -> T {
    match pin!(check).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(decision) => decision,
        Poll::Pending => panic!("memory answers at once"),
    }
}

#[test]
fn allowed_checks_of_few_and_of_many_limits_allocate_nothing() {
    let rig = rig("
domain: d
descriptors:
  - {key: user, limit: 1000000/second}
  - {key: remote_address/24/64, limit: 1000000/minute}
  - {key: path, limit: 1000000/hour, algorithm: fixed_window}
  - {key: global, limit: 1000000/day}
");
    let one: [(&str, &str); 1] = [("user", "0123456789abcdef")];
    let four: [(&str, &str); 4] =
        [("user", "0123456789abcdef"), ("remote_address", "10.1.2.3"), ("path", "/x"), ("tenant", "t")];
    let entries = [("user", "0123456789abcdef")];
    let descriptors = [Descriptor { entries: &entries, ..Descriptor::default() }];
    let checks =
        [Check::attributes("d", &one), Check::attributes("d", &four), Check::descriptors("d", &descriptors)];
    for (check, limits) in checks.iter().zip([2, 4, 1]) {
        // The first one puts the thread's own state in place.
        assert_eq!(now(rig.limiter.check(check)).limits.len(), limits);
        let made = allocations(|| {
            for _ in 0..100 {
                assert!(now(rig.limiter.check(check)).is_allowed());
            }
        });
        assert_eq!(made, 0, "a check of {limits} limits");
    }
}

/// Where an upstream is limited, where it is only measured for signals, and where it is both.
#[test]
fn requests_to_an_upstream_allocate_nothing() {
    const WORKERS: &str = "workers: {limit: adaptive}";
    const ADAPT: &str = "adapt: {signals: {slow: {above: 300, measure: upstream_p99_ms}}, order: [free]}";
    for section in [WORKERS.to_owned(), ADAPT.to_owned(), format!("{WORKERS}, {ADAPT}")] {
        let rig = rig(&format!(
            "{{domain: d, descriptors: [{{key: user, limit: 1000000/second}}], overload: {{{section}}}}}"
        ));
        let attributes = [("user", "0123456789abcdef")];
        let check = Check::attributes("d", &attributes);
        let request = || {
            let began = rig.limiter.clock().now();
            let place = now(rig.limiter.enter_upstream(&check, "upstream", began));
            let mut place = place.unwrap_or_else(|shed| panic!("{shed:?}")).expect("a place");
            assert!(now(rig.limiter.check(&check)).is_allowed());
            place.ended(Ended::Completed);
        };
        // The first ones put the thread's own state in place.
        (0..3).for_each(|_| request());
        assert_eq!(allocations(|| (0..100).for_each(|_| request())), 0, "{section}");
    }
}

/// Operators may have hundreds of domains, most of them idle: `--memory` bounds counters, not what a domain takes besides.
#[test]
fn a_domain_whose_capacity_is_not_contended_takes_little_memory() {
    const DOMAINS: usize = 100;
    let with_domains = |section: &str| {
        let files: Vec<String> = (0..DOMAINS)
            .map(|at| format!("{{domain: d{at}, descriptors: [{{key: user, limit: 9/second}}]{section}}}"))
            .collect();
        let limiter = || {
            let Rig { limiter, .. } = rig::rig_of(&files.iter().map(String::as_str).collect::<Vec<_>>());
            for at in 0..DOMAINS {
                let domain = format!("d{at}");
                let attributes = [("user", "a"), ("tenant", "acme"), ("tier", "pro"), ("path", "/pay")];
                assert!(now(limiter.check(&Check::attributes(&domain, &attributes))).is_allowed());
            }
            limiter
        };
        bytes_kept(limiter)
    };
    // The first time names are interned.
    let plain = [with_domains(""), with_domains("")][1];
    for capacity in ["1000/second", "1000 in flight"] {
        let section = format!(
            ", overload: {{priorities: [{{when: {{path: /pay}}, priority: critical}}], fleet: {{capacity: {capacity}, reserve: \
             {{critical: 20%}}}}, fairness: {{by: tenant, guarantees: {{pro: 1% each}}}}}}"
        );
        let own = (with_domains(&section) - plain) / DOMAINS as i64;
        assert!((1_024..16_384).contains(&own), "{own} bytes for each domain with {capacity}");
    }
}
