//! A store that does not answer: the rules' policy does.

mod rig;

use rig::{check, rules};
use std::sync::Arc;
use tollgate_core::{Charge, Cost, CounterStore, Outcomes, Permit, StoreError, SystemClock};
use tollgate_engine::{Limiter, Origin};

/// A store that is always away.
struct Away;

impl CounterStore for Away {
    async fn charge(&self, _: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        Err(StoreError::Timeout)
    }
    async fn debit(&self, _: &[Charge<'_>]) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
    async fn release(&self, _: &[Permit<'_>]) -> Result<(), StoreError> {
        Err(StoreError::Timeout)
    }
}

fn limiter() -> Limiter<Away> {
    let text = "
domain: d
descriptors:
  - {key: user, name: comfort, limit: 10/minute}
  - {key: login, name: security, class: security, limit: 5/minute}
  - {key: tokens, name: cost, class: cost, limit: 5/minute}
  - {key: path, name: chosen, limit: 5/minute, on_error: closed}
  - {key: trial, name: trial, class: security, limit: 5/minute, shadow: true}
";
    Limiter::new(rules(text), Away, Arc::new(SystemClock::new()))
}

/// An outage of the store must not become an outage of the API, nor open the doors that must stay shut.
#[test]
fn each_class_fails_as_it_says() {
    type Case = (&'static [(&'static str, &'static str)], Origin, Option<&'static str>);
    let cases: [Case; 8] = [
        (&[("user", "u")], Origin::FailOpen, None),
        (&[("login", "u")], Origin::FailClosed, Some("security")),
        (&[("user", "u"), ("login", "u")], Origin::FailClosed, Some("security")),
        (&[("tokens", "u"), ("tier", "free")], Origin::FailClosed, Some("cost")),
        (&[("tokens", "u"), ("tier", "pro")], Origin::FailOpen, None),
        (&[("path", "u")], Origin::FailClosed, Some("chosen")),
        (&[("trial", "u")], Origin::FailOpen, None),
        (&[("other", "u")], Origin::Unmatched, None),
    ];
    for (request, origin, denied_by) in cases {
        let decision = check(&limiter(), request, Cost::ONE);
        assert_eq!(decision.origin, origin, "{request:?}");
        assert_eq!(decision.denied_by_name(), denied_by, "{request:?}");
        assert_eq!(decision.is_allowed(), origin != Origin::FailClosed, "{request:?}");
    }
}
