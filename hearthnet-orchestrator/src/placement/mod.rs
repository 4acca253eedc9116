//! Selection of layers for a host with `--layers auto`.
//!
//! Pure: computes a range from the advertised ranges, the memory of this machine and the model's
//! size. The rules, also in `specs/shard-host.md` 7:
//!
//! 1. *Number.* The fair share is the model divided by the number of hosts, this one included, and
//!    by at least two, so that no host takes a whole model. If other hosts serve and layers are
//!    missing, it is the longest missing run if that is more, since a conversation needs all
//!    layers. The memory of the machine is the upper limit.
//! 2. *Range.* Of all ranges of that length, the one with the most missing layers; on a tie, the
//!    one whose layers are served least; then the one of which the host has most on its disk; then
//!    the first.
//! 3. *Concurrent starts.* Hosts that start together cannot see each other's choice. So each
//!    checks again after it has advertised, and when advertisements change. If layers are missing,
//!    and each of its own is also served by a host that ranks before it (longer range, then smaller
//!    node id), it chooses again.
//!
//! By rule 3, the first-ranked host of a layer stays. Moves thus never uncover a layer, even when
//! several hosts move at once. A host that moves takes missing layers, so the moves end.
//!
//! Moves of a running host, by these rules or by a plan: [`auto`]; with less memory: [`shrink`].
//! Coverage of models by a community: [`coverage`]. Placement by measurements: [`plan`], whose
//! input [`observed`] takes from the log.

pub mod auto;
pub mod coverage;
pub mod observed;
pub mod plan;
pub mod shrink;

use std::ops::Range;

use hearthnet_bus::NodeId;

/// Layers that one host serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)] // Built by readers of advertisements.
pub struct Held {
    pub node: NodeId,
    /// First and last layer, inclusive.
    pub range: (u32, u32),
}

impl Held {
    fn holds(&self, layer: u32) -> bool {
        self.range.0 <= layer && layer <= self.range.1
    }

    /// Sort key: the first host in this order keeps its layers.
    fn rank(&self) -> (std::cmp::Reverse<u32>, NodeId) {
        let layers = self.range.1.saturating_sub(self.range.0);
        (std::cmp::Reverse(layers), self.node)
    }
}

/// Runs of layers that no host holds, in order, for a model with `total` layers.
pub fn missing(total: u32, held: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut held = held.to_vec();
    held.sort_unstable();
    let mut runs = Vec::new();
    let mut next = 0;
    for (lo, hi) in held {
        if lo > next && next < total {
            runs.push((next, lo.min(total) - 1));
        }
        next = next.max(hi.saturating_add(1));
    }
    if next < total {
        runs.push((next, total - 1));
    }
    runs
}

/// Runs of layers as text: `0-14, 20`.
pub fn runs_text(runs: &[(u32, u32)]) -> String {
    let texts: Vec<String> = runs
        .iter()
        .map(|(lo, hi)| match lo == hi {
            true => lo.to_string(),
            false => format!("{lo}-{hi}"),
        })
        .collect();
    texts.join(", ")
}

/// [`choose_near`], for a host without weights on its disk.
fn choose(total: u32, room: u32, others: &[Held]) -> Option<(u32, u32)> {
    choose_near(total, room, others, |_| false)
}

/// Selects the inclusive range for a host with memory for `room` layers of a model with `total`
/// layers (at least 1), next to `others`. `None` if there is no room or no layer. The host's disk
/// has the weights of the layers that are `here`: a host that restarts takes its layers again, if
/// others are not needed more.
pub fn choose_near(
    total: u32,
    room: u32,
    others: &[Held],
    here: impl Fn(u32) -> bool,
) -> Option<(u32, u32)> {
    if total == 0 || room == 0 {
        return None;
    }
    let mut nodes: Vec<NodeId> = others.iter().map(|h| h.node).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let hosts = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
    let share = total.div_ceil(hosts.saturating_add(1).max(2));
    let ranges: Vec<(u32, u32)> = others.iter().map(|h| h.range).collect();
    let gap = missing(total, &ranges)
        .iter()
        .map(|(lo, hi)| hi - lo + 1)
        .max()
        .unwrap_or(0);
    let wanted = if hosts == 0 { share } else { share.max(gap) };
    let size = wanted.min(room).min(total);

    // Number of hosts per layer.
    let served: Vec<u64> = (0..total)
        .map(|layer| others.iter().filter(|h| h.holds(layer)).count() as u64)
        .collect();
    let here: Vec<bool> = (0..total).map(here).collect();
    let score = |lo: u32| {
        let (first, count) = (lo as usize, size as usize);
        let window = served.iter().skip(first).take(count);
        let covered = window.clone().filter(|&&n| n > 0).count();
        let here = here.iter().skip(first).take(count);
        let away = here.filter(|&&here| !here).count();
        (covered, window.sum::<u64>(), away, lo)
    };
    let lo = (0..=total - size).min_by_key(|&lo| score(lo))?;
    Some((lo, lo + size - 1))
}

/// Part of a range that a host may serve, of a model whose layers `together` one machine must run: the
/// range with all of them, if the host has memory for so many layers, else the layers before them.
/// `None` if there are none.
pub fn legal(range: (u32, u32), together: &Range<u32>, room: u32) -> Option<(u32, u32)> {
    let (lo, hi) = range;
    let last = together.end.saturating_sub(1);
    let apart = together.len() < 2 || hi < together.start || (lo <= together.start && hi >= last);
    if apart {
        return Some(range);
    }
    if together.end - together.start <= room {
        return Some((lo.min(together.start).max(together.end - room), last));
    }
    (lo < together.start).then(|| (lo, together.start - 1))
}

/// Returns the range to which the host `mine` should move, if it should (rule 3).
pub fn settle(total: u32, room: u32, mine: Held, others: &[Held]) -> Option<(u32, u32)> {
    let ranges: Vec<(u32, u32)> = others.iter().chain([&mine]).map(|h| h.range).collect();
    if missing(total, &ranges).is_empty() {
        return None;
    }
    let first: Vec<&Held> = others.iter().filter(|h| h.rank() < mine.rank()).collect();
    let spare = (mine.range.0..=mine.range.1).all(|layer| first.iter().any(|h| h.holds(layer)));
    if !spare {
        return None;
    }
    choose(total, room, others).filter(|&range| range != mine.range)
}

/// Number of layers that fit into `budget` bytes, each counted as large as the largest.
pub fn room(budget: u64, layer_bytes: &[u64]) -> u32 {
    let largest = layer_bytes.iter().copied().max().unwrap_or(0).max(1);
    let fit = (budget / largest).min(layer_bytes.len() as u64);
    u32::try_from(fit).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::plan::tests::node;
    use super::*;

    #[test]
    fn a_range_keeps_layers_together_that_one_machine_must_run() {
        let legal = |range, room| legal(range, &(9..16), room);
        assert_eq!(legal((0, 8), 9), Some((0, 8)));
        assert_eq!(legal((9, 15), 7), Some((9, 15)));
        assert_eq!(legal((4, 11), 8), Some((8, 15)));
        assert_eq!(legal((12, 15), 12), Some((9, 15)));
        assert_eq!(legal((4, 11), 6), Some((4, 8)));
        assert_eq!(legal((10, 13), 6), None);
        assert_eq!(super::legal((4, 11), &(16..16), 8), Some((4, 11)));
    }

    fn held(n: usize, lo: u32, hi: u32) -> Held {
        Held {
            node: node(n),
            range: (lo, hi),
        }
    }

    #[test]
    fn the_first_host_takes_half_and_the_second_the_other_half() {
        assert_eq!(choose(30, 99, &[]), Some((0, 14)));
        assert_eq!(choose(30, 99, &[held(0, 0, 14)]), Some((15, 29)));
        assert_eq!(choose(31, 99, &[]), Some((0, 15)));
        assert_eq!(choose(1, 99, &[]), Some((0, 0)));
    }

    #[test]
    fn a_third_host_doubles_a_third_of_the_layers_and_a_fourth_goes_elsewhere() {
        let two = [held(0, 0, 14), held(1, 15, 29)];
        assert_eq!(choose(30, 99, &two), Some((0, 9)));
        let three = [two[0], two[1], held(2, 0, 9)];
        assert_eq!(choose(30, 99, &three), Some((10, 17)));
    }

    #[test]
    fn of_equally_needed_ranges_a_host_takes_the_one_on_its_disk() {
        let near = |others: &[Held]| choose_near(30, 99, others, |layer| layer >= 15);
        // After a power cut no host sees another one.
        assert_eq!(near(&[]), Some((15, 29)));
        // Beside hosts of all layers it has to fetch none.
        assert_eq!(near(&[held(0, 0, 14), held(1, 15, 29)]), Some((15, 24)));
        // Missing layers are needed more.
        assert_eq!(near(&[held(0, 15, 29)]), Some((0, 14)));
    }

    #[test]
    fn small_machines_line_up_until_the_model_is_whole() {
        let mut others = Vec::new();
        for n in 0..6 {
            let range = choose(30, 5, &others).unwrap();
            assert_eq!(range, (5 * n as u32, 5 * n as u32 + 4));
            others.push(held(n, range.0, range.1));
        }
    }

    #[test]
    fn a_machine_with_room_closes_the_whole_gap_that_small_ones_leave() {
        assert_eq!(choose(30, 99, &[held(0, 0, 1)]), Some((2, 29)));
        let ends = [held(0, 0, 3), held(1, 26, 29)];
        assert_eq!(choose(30, 99, &ends), Some((4, 25)));
    }

    #[test]
    fn a_machine_without_room_for_one_layer_takes_none() {
        assert_eq!(choose(30, 0, &[]), None);
        assert_eq!(room(999, &[1000; 30]), 0);
        assert_eq!(room(5999, &[900, 1000]), 2);
        assert_eq!(room(2500, &[1000; 30]), 2);
        assert_eq!(room(0, &[]), 0);
    }

    #[test]
    fn of_two_equal_concurrent_starts_the_smaller_id_stays() {
        let (a, b) = (held(0, 0, 14), held(1, 0, 14));
        assert_eq!(settle(30, 99, a, &[b]), None);
        assert_eq!(settle(30, 99, b, &[a]), Some((15, 29)));
    }

    #[test]
    fn of_two_concurrent_starts_the_longer_range_stays() {
        let (small, large) = (held(0, 0, 4), held(1, 0, 14));
        assert_eq!(settle(30, 5, small, &[large]), Some((15, 19)));
        assert_eq!(settle(30, 99, large, &[small]), None);
    }

    #[test]
    fn a_replica_stays_while_nothing_is_missing_and_helps_when_something_is() {
        let (a, b, replica) = (held(0, 0, 14), held(1, 15, 29), held(2, 0, 9));
        assert_eq!(settle(30, 99, replica, &[a, b]), None);
        assert_eq!(settle(30, 99, replica, &[a]), Some((15, 29)));
        // The only host of a layer never leaves it.
        assert_eq!(settle(30, 99, replica, &[b]), None);
    }

    #[test]
    fn missing_runs_are_found_and_read_well() {
        let runs = missing(30, &[(3, 9), (5, 14), (16, 28)]);
        assert_eq!(runs, [(0, 2), (15, 15), (29, 29)]);
        assert_eq!(runs_text(&runs), "0-2, 15, 29");
        assert_eq!(missing(30, &[(0, u32::MAX)]), []);
        assert_eq!(missing(2, &[(7, 9)]), [(0, 1)]);
        assert_eq!(missing(0, &[]), []);
    }

    fn any_hosts() -> impl Strategy<Value = (u32, Vec<(Held, u32)>)> {
        (1u32..40).prop_flat_map(|total| {
            let host = (0..total, 0..total, 1..=total);
            proptest::collection::vec(host, 1..10).prop_map(move |hosts| {
                let hosts = hosts
                    .into_iter()
                    .enumerate()
                    .map(|(n, (a, b, room))| (held(n, a.min(b), a.max(b)), room));
                (total, hosts.collect())
            })
        })
    }

    fn covered(total: u32, hosts: &[(Held, u32)]) -> Vec<bool> {
        (0..total)
            .map(|layer| hosts.iter().any(|(h, _)| h.holds(layer)))
            .collect()
    }

    proptest! {
        #[test]
        fn a_choice_fits_model_and_memory_and_prefers_missing_layers(
            (total, hosts) in any_hosts(), room in 1u32..50,
        ) {
            let others: Vec<Held> = hosts.iter().map(|(h, _)| *h).collect();
            let (lo, hi) = choose(total, room, &others).unwrap();
            prop_assert!(lo <= hi && hi < total && hi - lo < room);
            let before = covered(total, &hosts);
            let gap = missing(total, &others.iter().map(|h| h.range).collect::<Vec<_>>());
            let longest = gap.iter().map(|(lo, hi)| hi - lo + 1).max().unwrap_or(0);
            let closed = (lo..=hi).filter(|&l| !before[l as usize]).count() as u32;
            prop_assert!(closed >= longest.min(room));
        }

        #[test]
        fn moving_all_at_once_never_uncovers_a_layer_and_comes_to_an_end(
            (total, mut hosts) in any_hosts(),
        ) {
            // Each round with a move covers at least one more layer.
            for _ in 0..=total {
                let before = covered(total, &hosts);
                let all: Vec<Held> = hosts.iter().map(|(h, _)| *h).collect();
                let mut moved = false;
                for (host, room) in &mut hosts {
                    let others: Vec<Held> =
                        all.iter().copied().filter(|h| h.node != host.node).collect();
                    if let Some(range) = settle(total, *room, *host, &others) {
                        host.range = range;
                        moved = true;
                    }
                }
                let after = covered(total, &hosts);
                prop_assert!(before.iter().zip(&after).all(|(b, a)| *a || !b));
                if !moved {
                    return Ok(());
                }
                prop_assert!(after.iter().filter(|c| **c).count() > before.iter().filter(|c| **c).count());
            }
            prop_assert!(false, "still moving");
        }

        #[test]
        fn hosts_that_start_together_with_room_enough_end_with_the_whole_model(
            total in 2u32..64, hosts in 2usize..8,
        ) {
            let range = choose(total, total, &[]).unwrap();
            let mut all: Vec<Held> = (0..hosts).map(|n| held(n, range.0, range.1)).collect();
            let before = all.clone();
            for host in &mut all {
                let others: Vec<Held> = before.iter().copied().filter(|h| h.node != host.node).collect();
                if let Some(range) = settle(total, total, *host, &others) {
                    host.range = range;
                }
            }
            let ranges: Vec<_> = all.iter().map(|h| h.range).collect();
            prop_assert_eq!(missing(total, &ranges), []);
        }
    }
}
