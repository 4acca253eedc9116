use proptest::prelude::*;

use super::*;
use crate::tests::node;

const MINUTE: u64 = 60_000;
const WEIGHTS: WeightsId = WeightsId([7; 32]);

fn steps(all: &mut ShardHealthTracker, host: &str, count: usize, ms: u64, now_ms: u64) {
    for _ in 0..count {
        let took = Duration::from_millis(ms);
        all.answered(&node(host), ("m:0-9", WEIGHTS), 10, took, now_ms);
    }
}

/// Standing of the host `a`.
fn standing(all: &ShardHealthTracker, now_ms: u64) -> Standing {
    all.standing(&node("a"), now_ms)
}

#[test]
fn speed_is_measured_per_layer_and_known_after_a_few_steps_until_it_is_stale() {
    let mut all = ShardHealthTracker::default();
    steps(&mut all, "a", LEARNING - 1, 20, 0);
    assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", 0), None);
    steps(&mut all, "a", 1, 20, 0);
    assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", 0), Some(2.0));
    // The other shard is unmeasured: the host's speed is used.
    assert_eq!(all.ms_per_layer(&node("a"), "m:10-19", 0), Some(2.0));
    assert_eq!(all.ms_per_layer(&node("b"), "m:0-9", 0), None);
    let layers = |weights| all.step_layers(&node("a"), ("m:0-9", weights), 0);
    assert_eq!(layers(WEIGHTS), Some(10));
    assert_eq!(layers(WeightsId([8; 32])), None);
    assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", STALE_MS), None);
    // A single step is not enough after the measurements expired.
    steps(&mut all, "a", 1, 10, STALE_MS);
    assert_eq!(all.ms_per_layer(&node("a"), "m:0-9", STALE_MS), None);
}

#[test]
fn the_delay_of_a_host_is_known_after_a_few_steps_until_it_is_stale() {
    let mut all = ShardHealthTracker::default();
    steps(&mut all, "a", LEARNING, 20, 0);
    let mut travel = |us| all.travelled(&node("a"), Duration::from_micros(us), 1_152, 0);
    (1..LEARNING).for_each(|_| travel(600));
    // A single slow answer does not count.
    travel(90_000);
    let known = vec![Way {
        node: node("a"),
        took: Duration::from_micros(300),
        row_bytes: 1_152,
    }];
    assert_eq!(all.ways(0), known);
    assert_eq!(all.ways(STALE_MS), []);
    all.travelled(&node("b"), Duration::from_micros(10), 1_152, 0);
    assert_eq!(all.ways(0), known);
}

#[test]
fn the_reference_comes_from_other_hosts_with_the_same_weights() {
    let mut all = ShardHealthTracker::default();
    for (host, ms) in [("a", 20), ("b", 30), ("c", 400)] {
        steps(&mut all, host, LEARNING, ms, 0);
    }
    let reference = |host: &str, weights| all.reference_per_layer(&node(host), weights, 0);
    let median = Some(Duration::from_millis(3));
    assert_eq!(reference("c", WEIGHTS), median);
    assert_eq!(reference("nobody", WEIGHTS), median);
    assert_eq!(reference("c", WeightsId([8; 32])), None);
    assert_eq!(all.reference_per_layer(&node("c"), WEIGHTS, STALE_MS), None);
}

#[test]
fn labels_are_the_names_that_the_specifications_list() {
    use FailureKind::{Corruption, Disputed, Lost, Refused, Slow, Stalled, Unreachable};
    let kinds = [
        Corruption,
        Stalled,
        Slow,
        Lost,
        Unreachable,
        Refused,
        Disputed,
    ];
    let spec = include_str!("../../../../specs/distributed-inference.md");
    for kind in kinds {
        assert!(spec.contains(&format!("\n| `{}` | ", kind.into_str())));
    }
    let standings = [Standing::Good, Standing::Failing, Standing::Quarantined];
    let labels = standings.map(|standing| format!("`{}`", standing.into_str()));
    let listed = format!("{{standing}}` ({})", labels.join(", "));
    assert!(include_str!("../../../../specs/http-api.md").contains(&listed));
}

#[test]
fn one_hiccup_in_twenty_is_in_the_95th_percentile_and_not_in_the_median() {
    let mut all = ShardHealthTracker::default();
    for step in 0..40 {
        let ms = if step % 10 == 9 { 500 } else { 10 };
        steps(&mut all, "a", 1, ms, 0);
    }
    let health = all.all(0);
    let speed = &health[0].shards[0];
    assert_eq!((speed.p50_ms, speed.p95_ms), (1.0, 50.0));
    assert_eq!(health[0].standing, Standing::Good);
}

#[test]
fn a_failure_puts_a_host_behind_for_one_half_life_and_good_work_shortens_that() {
    for kind in [FailureKind::Lost, FailureKind::Slow, FailureKind::Refused] {
        let mut all = ShardHealthTracker::default();
        all.failed(&node("a"), kind, 0);
        assert_eq!(standing(&all, HALF_LIFE_MS - 1), Standing::Failing);
        assert_eq!(standing(&all, HALF_LIFE_MS + 1), Standing::Good);
        assert_eq!(all.standing(&node("b"), 0), Standing::Good);
        // Two failures in a row take twice as long to decay.
        all.failed(&node("a"), kind, 0);
        assert_eq!(standing(&all, 2 * HALF_LIFE_MS - 1), Standing::Failing);
        steps(&mut all, "a", 2 * STEPS_PER_RECOVERY as usize + 2, 1, 1);
        assert_eq!(standing(&all, 1000), Standing::Good);
    }
}

#[test]
fn reaching_a_host_clears_its_unreachability() {
    let mut all = ShardHealthTracker::default();
    all.failed(&node("a"), FailureKind::Unreachable, 0);
    all.failed(&node("a"), FailureKind::Unreachable, 0);
    let away = &all.all(0)[0];
    assert_eq!((away.online, away.standing), (false, Standing::Failing));
    assert_eq!(away.last_seen_ms, None);
    all.reached(&node("a"), 5);
    let back = &all.all(10)[0];
    assert_eq!((back.online, back.standing), (true, Standing::Good));
    assert_eq!(back.last_seen_ms, Some(5));
}

#[test]
fn implausible_rows_cause_a_quarantine_that_doubles_and_ends() {
    let mut all = ShardHealthTracker::default();
    let (first, longest) = QUARANTINE_MS;
    all.failed(&node("a"), FailureKind::Corruption, 0);
    assert_eq!(standing(&all, first - 1), Standing::Quarantined);
    assert_eq!(all.all(MINUTE)[0].quarantine_ms, first - MINUTE);
    assert_eq!(standing(&all, first), Standing::Good);
    // Good work does not shorten the memory of corruption.
    steps(&mut all, "a", 10 * STEPS_PER_RECOVERY as usize, 1, first);
    all.failed(&node("a"), FailureKind::Corruption, first);
    let second = all.all(first)[0].quarantine_ms;
    assert!(
        (2 * first - MINUTE..=2 * first).contains(&second),
        "{second}"
    );
    for _ in 0..100 {
        all.failed(&node("a"), FailureKind::Corruption, first);
    }
    assert_eq!(all.all(first)[0].quarantine_ms, longest);
    // After a month, the count has decayed to nothing.
    let month = 30 * 24 * 60 * MINUTE;
    let mut all = ShardHealthTracker::default();
    all.failed(&node("a"), FailureKind::Corruption, 0);
    all.failed(&node("a"), FailureKind::Corruption, month);
    assert_eq!(all.all(month)[0].quarantine_ms, first);
}

#[test]
fn blameless_codes_are_not_counted() {
    let blameless = "boundary_overflow stream_limit kv_full leaving revoked";
    for code in blameless.split(' ') {
        assert_eq!(FailureKind::of_code(&code.into()), None, "{code}");
    }
    for (code, kind) in [
        ("connection_lost", FailureKind::Lost),
        ("pipeline_stalled", FailureKind::Stalled),
        ("degraded", FailureKind::Slow),
        ("internal", FailureKind::Refused),
        ("anything that a host makes up", FailureKind::Refused),
    ] {
        assert_eq!(FailureKind::of_code(&Code::new(code)), Some(kind), "{code}");
    }
}

proptest! {
    #[test]
    fn the_memory_for_hosts_and_shards_is_bounded(
        events in proptest::collection::vec((0u32..2000, 0u8..20, 0u8..8, 0u64..1000), 0..3000)
    ) {
        let mut all = ShardHealthTracker::default();
        let mut now_ms = 0;
        for (host, shard, what, later) in events {
            now_ms += later * MINUTE;
            let host = node(&format!("h{host}"));
            match what {
                0 => all.failed(&host, FailureKind::Corruption, now_ms),
                1 => all.failed(&host, FailureKind::Lost, now_ms),
                2 => all.reached(&host, now_ms),
                _ => all.answered(&host, (&format!("s{shard}"), WEIGHTS), 0, Duration::MAX, now_ms),
            }
        }
        let told = all.all(now_ms);
        prop_assert!(told.len() <= MAX_HOSTS);
        for one in &told {
            prop_assert!(one.quarantine_ms <= QUARANTINE_MS.1);
            prop_assert!(one.shards.len() <= MAX_SHARDS);
            prop_assert!(one.failures.values().all(|weight| weight.is_finite()));
        }
        prop_assert!(all.hosts.values().all(|one| one.shards.len() <= MAX_SHARDS));
    }
}
