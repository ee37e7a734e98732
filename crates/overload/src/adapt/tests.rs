use super::*;
use proptest::prelude::*;

fn controller() -> AdaptController {
    AdaptController::new(AdaptConfig {
        bounds: vec![100.0, 300.0],
        tiers: 3,
        least: 200,
        step: TimeDelta::from_secs(5),
    })
}

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_secs(1_000 + seconds)
}

fn run(controller: &mut AdaptController, from: u64, steps: u64, value: f64) -> Vec<AdaptStep> {
    (from..from + steps).flat_map(|n| controller.report([(0, value)], at(5 * n))).collect()
}

#[test]
fn tiers_are_tightened_in_order_down_to_the_least_and_come_back() {
    let mut controller = controller();
    let tightened = run(&mut controller, 1, 8, 150.0);
    assert_eq!(tightened.iter().map(|step| step.tier).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 0, 0, 0]);
    run(&mut controller, 9, 30, 150.0);
    assert_eq!(controller.factors(), [200, 200, 200]);
    assert!(run(&mut controller, 39, 5, 90.0).is_empty(), "near the bound nothing changes");
    let loosened = run(&mut controller, 44, 60, 10.0);
    assert_eq!(loosened.first().map(|step| step.tier), Some(2), "last tightened, first loosened");
    assert_eq!(controller.factors(), [WHOLE; 3]);
}

#[test]
fn no_step_comes_early() {
    let mut controller = controller();
    assert_eq!(controller.report([(1, 400.0)], at(10)).len(), 1);
    assert_eq!(controller.report([(1, 400.0)], at(14)), []);
    assert_eq!(controller.report([], at(15)).len(), 1);
}

/// A worker whose timer is a little faster than the steps would else make every second one.
#[test]
fn reports_that_come_a_little_early_make_a_step_each() {
    let mut controller = controller();
    let report = |n: u64| Timestamp::from_micros(4_900_000 * n);
    let steps: usize = (0..20).map(|n| controller.report([(0, 150.0)], report(n)).len()).sum();
    assert!((18..=20).contains(&steps), "{steps} steps in 20 intervals");
}

/// A node without traffic must not keep limits tightened, nor tighten them further by what was reported long ago.
#[test]
fn missed_steps_are_made_up_for() {
    let mut controller = controller();
    run(&mut controller, 0, 3, 150.0);
    // After the step at 10.
    controller.report([(0, 150.0)], at(12));
    assert_eq!(controller.factors()[0], 512);
    assert_eq!(controller.catch_up(at(19)), [], "a report may still make the step of 15");
    let tightened = controller.catch_up(at(20));
    assert_eq!(tightened.iter().map(|step| step.to).collect::<Vec<_>>(), [409], "by the report of 12");
    let later = controller.report([], at(40));
    // Calm at 20, and at 25, 30, 35 and 40 one step each.
    assert_eq!(later.iter().map(|step| step.to).collect::<Vec<_>>(), [511, 638, 797, 996]);
    assert!(later.iter().all(|step| step.signal.is_none()));
    assert_eq!(controller.report([], at(10_000)).len(), 1, "back to the whole");
    assert_eq!(controller.signals().collect::<Vec<_>>(), [0.0, 0.0]);
}

/// What is reported now is no reason for the steps that were missed before.
#[test]
fn a_report_after_a_pause_makes_one_step() {
    let mut controller = controller();
    run(&mut controller, 0, 3, 150.0);
    let steps = controller.report([(0, 150.0)], at(61));
    assert_eq!(controller.factors()[0], 800, "loosened meanwhile, tightened once: {steps:?}");
    assert_eq!(steps.iter().filter(|step| step.signal.is_some()).count(), 1);
    // From calm times on, the first report makes a step at once, and the next one comes a step later.
    let mut controller = super::tests::controller();
    assert_eq!(controller.report([(0, 10.0)], at(0)), []);
    assert_eq!(controller.report([(0, 150.0)], at(1_003)).len(), 1);
    assert_eq!(controller.next_step(), at(1_008));
}

proptest! {
    #[test]
    fn factors_stay_between_the_least_and_the_whole(values in prop::collection::vec((0.0f64..400.0, 0_u64..40), 1..200)) {
        let (mut controller, mut now) = (controller(), 0);
        for (n, (value, pause)) in values.into_iter().enumerate() {
            now += pause;
            controller.report([(n % 3, value)], at(now));
            prop_assert!(controller.factors().iter().all(|factor| (200..=WHOLE).contains(factor)));
            // An earlier tier is at its least before a later one is touched.
            let touched = controller.factors().iter().rposition(|factor| *factor < WHOLE).unwrap_or(0);
            prop_assert!(controller.factors()[..touched].iter().all(|factor| *factor == 200));
        }
    }

    /// Whoever makes the steps, and however late: limits are those of a controller that is never late.
    #[test]
    fn a_late_controller_ends_where_a_punctual_one_does(
        reports in prop::collection::vec((0.0f64..200.0, 1_u64..60), 1..60),
        pause in 0_u64..200,
    ) {
        let (mut late, mut punctual, mut now) = (controller(), controller(), 0);
        for (value, after) in reports {
            for second in now..now + after {
                punctual.catch_up(at(second));
            }
            now += after;
            for controller in [&mut late, &mut punctual] {
                controller.report([(0, value)], at(now));
            }
            prop_assert_eq!(late.factors(), punctual.factors());
        }
        for second in now..now + pause {
            punctual.catch_up(at(second));
        }
        late.catch_up(at(now + pause));
        punctual.catch_up(at(now + pause));
        prop_assert_eq!(late.factors(), punctual.factors());
        // Every step within some minutes is a calm one: nothing stays tightened.
        late.catch_up(at(now + pause + 600));
        prop_assert_eq!(late.factors(), &[WHOLE; 3]);
    }

    /// However often a value is reported, it makes no more steps than there are intervals.
    #[test]
    fn steps_are_not_more_frequent_than_their_interval(millis in prop::collection::vec(0_u64..3_000, 1..200)) {
        let (mut controller, mut now, mut last) = (controller(), at(0), None::<Timestamp>);
        for pause in millis {
            now = now + TimeDelta::from_millis(pause);
            for step in controller.report([(0, 150.0)], now) {
                prop_assert!(step.signal.is_some());
                prop_assert!(last.is_none_or(|last| controller.next_step() >= last + TimeDelta::from_secs(5)));
                last = Some(controller.next_step());
            }
        }
    }
}
