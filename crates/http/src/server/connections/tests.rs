use super::*;
use std::net::Ipv4Addr;

fn address(number: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number).expect("an address")))
}

fn waiting(max: usize) -> PortLimits {
    PortLimits::new(max, WhenFull::Wait)
}

fn is_open(slot: &ConnectionSlot) -> bool {
    !slot.activity.has_ended()
}

fn spoken(slots: &ConnectionSlots, from: usize) -> ConnectionSlot {
    let slot = slots.admit(address(from)).expect("a slot");
    slot.activity.idle(Instant::now());
    slot
}

/// Clients that connect and say nothing must not keep others out.
#[tokio::test(start_paused = true)]
async fn a_new_connection_displaces_the_oldest_silent_one() {
    let slots = ConnectionBudget::default().port(waiting(3));
    let served = spoken(&slots, 1);
    let silent = [1, 2].map(|from| slots.admit(address(from)).expect("a slot"));
    assert!(
        slots.admit(address(1)).is_none(),
        "those who come at the same moment do not displace each other"
    );
    tokio::time::advance(MIN_SILENT).await;
    let arrival = slots.admit(address(1)).expect("the place of a silent one");
    assert!(!is_open(&silent[0]) && is_open(&silent[1]) && is_open(&served));
    assert_eq!(slots.open(), 3);
    drop(silent);
    assert_eq!(slots.open(), 2, "the slot of the first belongs to the newcomer");
    drop((arrival, served));
    assert_eq!(slots.open(), 0);
}

/// A flood of silent connections displaces itself at once, and no connection that has sent a request, however long ago.
#[tokio::test(start_paused = true)]
async fn a_silent_flood_displaces_itself() {
    let slots = ConnectionBudget::default().port(waiting(40));
    let served = spoken(&slots, 1);
    tokio::time::advance(Duration::from_secs(60)).await;
    let flood: Vec<_> = (0..400).map(|_| slots.admit(address(1)).expect("a slot")).collect();
    assert!(is_open(&served));
    assert_eq!(flood.iter().filter(|one| is_open(one)).count(), 39);
    assert!(flood[400 - 39..].iter().all(is_open), "the oldest of them ended");
}

/// The idle connections of a proxy stay while there is room, and make place only when they have been idle for a while.
#[tokio::test(start_paused = true)]
async fn idle_connections_end_only_for_a_new_one_and_the_longest_idle_first() {
    let slots = ConnectionBudget::default().port(waiting(3));
    let first = spoken(&slots, 1);
    tokio::time::advance(Duration::from_secs(3_600)).await;
    let (second, third) = (spoken(&slots, 1), spoken(&slots, 1));
    slots.end_silent();
    assert!(is_open(&first), "an hour of silence after a request, and there is room");
    second.activity.busy();
    let _fourth = spoken(&slots, 1);
    assert!(!is_open(&first) && is_open(&second) && is_open(&third));
    assert!(slots.admit(address(1)).is_none(), "the rest is busy or was just used");
    tokio::time::advance(MIN_IDLE).await;
    assert!(slots.admit(address(1)).is_some());
    assert!(is_open(&second) && !is_open(&third), "a request in progress");
}

/// A connection whose wait is not timed counts as waiting from the first search that finds it, and a command in between
/// makes it young again.
#[tokio::test(start_paused = true)]
async fn an_untimed_wait_counts_from_the_first_search() {
    let slots = ConnectionBudget::default().port(waiting(2));
    let (first, second) = (spoken(&slots, 1), spoken(&slots, 1));
    first.activity.waiting();
    second.activity.waiting();
    tokio::time::advance(Duration::from_secs(60)).await;
    assert!(slots.admit(address(1)).is_none(), "seen for the first time");
    tokio::time::advance(MIN_IDLE / 2).await;
    first.activity.waiting();
    assert!(slots.admit(address(1)).is_none());
    tokio::time::advance(MIN_IDLE / 2).await;
    assert!(slots.admit(address(1)).is_some());
    assert!(is_open(&first) && !is_open(&second));
}

/// Where newcomers are rejected instead of waiting, one displaces even a young silent connection.
#[tokio::test(start_paused = true)]
async fn a_port_that_rejects_ends_young_silent_connections() {
    let slots = ConnectionBudget::default().port(PortLimits::new(1, WhenFull::Reject(b"full")));
    let silent = slots.admit(address(1)).expect("a slot");
    let arrival = slots.admit(address(1)).expect("its place");
    assert!(!is_open(&silent) && is_open(&arrival));
    arrival.activity.busy();
    assert!(slots.admit(address(1)).is_none());
}

/// A client that keeps all its connections just active enough must not keep other networks out.
#[tokio::test(start_paused = true)]
async fn a_network_with_few_connections_displaces_one_of_the_network_with_the_most() {
    let slots = ConnectionBudget::default().port(waiting(100));
    let few: Vec<_> = (0..4).map(|from| spoken(&slots, 10 + from)).collect();
    let many: Vec<_> = (0..96).map(|_| spoken(&slots, 1)).collect();
    assert!(slots.admit(address(1)).is_none(), "its own network has to wait");
    tokio::time::advance(SEARCH_INTERVAL).await;
    let other = spoken(&slots, 2);
    assert!(is_open(&other) && few.iter().all(is_open));
    assert_eq!(many.iter().filter(|one| !is_open(one)).count(), 1);
}

/// A flood on one port, however busy, leaves the others what they are guaranteed; a closed port guarantees nothing.
#[tokio::test(start_paused = true)]
async fn files_are_held_back_for_other_ports() {
    let budget = ConnectionBudget::new(20);
    let data = budget.port(PortLimits { guaranteed: 4, ..waiting(1_000) });
    let admin = budget.port(PortLimits { guaranteed: 6, ..waiting(1_000) });
    let mut held: Vec<_> = std::iter::from_fn(|| {
        let slot = data.admit(address(1))?;
        slot.activity.busy();
        Some(slot)
    })
    .collect();
    assert_eq!(held.len(), 14);
    let probes: Vec<_> = (0..6).map(|_| admin.admit(address(1)).expect("held back")).collect();
    assert!(probes.iter().all(is_open) && held.iter().all(is_open));
    // Above its guarantee, a port takes the place of silent and idle connections of the others.
    held[0].activity.idle(Instant::now());
    tokio::time::advance(MIN_IDLE).await;
    for probe in &probes {
        probe.activity.busy();
    }
    assert!(admin.admit(address(2)).is_some() && !is_open(&held[0]));
    drop((probes, admin));
    held.extend(std::iter::from_fn(|| data.admit(address(1)).inspect(|slot| slot.activity.busy())));
    assert_eq!(held.iter().filter(|one| is_open(one)).count(), 20);
}

/// A proxy opens a second file for a connection, so its connections count twice.
#[tokio::test(start_paused = true)]
async fn connections_that_need_two_files_count_twice() {
    let budget = ConnectionBudget::new(10);
    let (proxy, other) =
        (budget.port(PortLimits { files: 2, ..waiting(1_000) }), budget.port(waiting(1_000)));
    let mut held: Vec<_> =
        std::iter::from_fn(|| proxy.admit(address(1)).inspect(|slot| slot.activity.busy())).take(9).collect();
    assert_eq!(held.len(), 5);
    held.pop();
    let silent = [other.admit(address(1)).expect("a slot"), other.admit(address(1)).expect("a slot")];
    tokio::time::advance(MIN_SILENT).await;
    assert!(proxy.admit(address(1)).is_some(), "in place of two silent ones");
    assert!(!silent.iter().any(is_open));
}

/// A connection has its time for the first request, and a timer of the accept loop ends it.
#[tokio::test(start_paused = true)]
async fn silent_connections_end_in_time() {
    let first_request = Duration::from_secs(7);
    let slots = ConnectionBudget::default().port(PortLimits { first_request, ..waiting(10) });
    let (silent, speaks) = (slots.admit(address(1)).expect("a slot"), spoken(&slots, 1));
    let due = slots.end_silent().expect("a time");
    assert_eq!(due - Instant::now(), first_request);
    tokio::time::advance(first_request).await;
    assert_eq!(slots.end_silent(), None);
    assert!(!is_open(&silent) && is_open(&speaks));
    assert_eq!(slots.open(), 1);
}

/// A lower cap after a reload closes no connection, and a higher one wakes those that wait.
#[tokio::test(start_paused = true)]
async fn a_changed_cap_takes_effect_for_new_connections() {
    let slots = ConnectionBudget::default().port(waiting(1));
    let first = slots.admit(address(1)).expect("a slot");
    first.activity.busy();
    let admitted = slots.admit_when_free(address(1));
    let raised = async { slots.change(2, FIRST_REQUEST) };
    let (second, ()) = tokio::join!(admitted, raised);
    slots.change(1, FIRST_REQUEST);
    assert!(is_open(&first) && is_open(&second));
    assert!(slots.admit(address(1)).is_none());
}
