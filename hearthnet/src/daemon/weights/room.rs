//! Room on the disk for parts of models: what is given up when a fetch would exceed
//! `manners.disk_gb`.
//!
//! Pieces in use are never given up: those of heads, private layers and served layers. (Served layers
//! are, if their host fetches others, and there is no room for both.) Of the other pieces,
//! those of the model that is fetched go first, then those of the part whose last use is longest ago.
//! A part that is a second name of the user's own file takes no room, and stays.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use hearthnet_bus::log::{Adoption, Community};
use hearthnet_files::WeightsId;
use hearthnet_files::part::{Part, folder};

use super::store::{Parts, Purpose};
use crate::cli::{Failure, bytes, failure, first_digits};
use crate::models::disk_budget;

/// Folder of parts, and its limit.
pub(super) struct Disk {
    pub(super) parts: PathBuf,
    /// Bytes; `None`: half of what is free or taken by parts.
    pub(super) limit: Option<u64>,
    /// Models of which another task is about to open the part.
    pub(super) reserved: BTreeSet<[u8; 32]>,
}

impl Disk {
    fn budget(&self, stored: &[Stored]) -> io::Result<u64> {
        let taken = stored.iter().map(|part| part.taken).sum();
        disk_budget(self.limit, &self.parts, taken)
    }
}

/// Bytes that were given up, by part.
pub(super) type GivenUp = Vec<(WeightsId, u64)>;

/// Why there is no room.
#[derive(Debug)]
pub(super) enum NoRoom {
    Full(Full),
    Io(io::Error),
}

/// Room that is lacking, in bytes.
#[derive(Debug, PartialEq)]
pub(super) struct Full {
    /// Missing pieces.
    needed: u64,
    budget: u64,
    over: u64,
    /// Bytes that each of the other parts keeps.
    kept: Vec<(WeightsId, u64)>,
}

/// Part on the disk.
struct Stored {
    weights: WeightsId,
    /// Bytes on the disk.
    taken: u64,
    /// Bytes that are in use and have to be fetched.
    awaited: u64,
    /// Bytes of pieces that are not in use.
    idle: u64,
    last_use_ms: u64,
    /// It is the part for which room is made.
    is_first: bool,
    /// The open part, and its pieces that are not in use.
    pieces: Option<(Arc<Part>, Vec<Range<u32>>)>,
}

/// Bytes that the parts take when all is fetched.
fn all_bytes(stored: &[Stored]) -> u64 {
    stored.iter().fold(0, |all: u64, part| {
        all.saturating_add(part.taken).saturating_add(part.awaited)
    })
}

/// Chooses bytes to give up, by part, in order. The error is the number of bytes for which nothing
/// can be given up.
fn give_up(stored: &[Stored], budget: u64) -> Result<Vec<(&Stored, u64)>, u64> {
    let mut order: Vec<&Stored> = stored.iter().collect();
    order.sort_by_key(|part| (!part.is_first, part.last_use_ms, part.weights));
    let mut over = all_bytes(stored).saturating_sub(budget);
    let mut chosen = Vec::new();
    for part in order {
        let given = part.idle.min(over);
        if given > 0 {
            over -= given;
            chosen.push((part, given));
        }
    }
    match over {
        0 => Ok(chosen),
        over => Err(over),
    }
}

/// Pieces of `all` that are not in `less`.
fn minus(all: &[Range<u32>], less: &[Range<u32>]) -> Vec<Range<u32>> {
    less.iter().fold(all.to_vec(), |left, cut| {
        let each = left.into_iter().flat_map(|run| {
            [
                run.start..run.end.min(cut.start),
                run.start.max(cut.end)..run.end,
            ]
        });
        each.filter(|run| !run.is_empty()).collect()
    })
}

/// First pieces of some, of so many bytes at least, or all. The tensors of the head are the last in
/// the order of pieces.
fn first_of(part: &Part, pieces: &[Range<u32>], bytes: u64) -> Vec<Range<u32>> {
    let mut left = bytes;
    let mut chosen = Vec::new();
    for run in pieces {
        if left == 0 {
            break;
        }
        let mut end = run.start;
        while end < run.end && left > 0 {
            let piece = part.table().piece(end);
            left = left.saturating_sub(piece.map_or(0, |piece| piece.len.into()));
            end += 1;
        }
        chosen.push(run.start..end);
    }
    chosen
}

impl Parts {
    /// Parts on the disk. With `open` also those that this process has not open are looked at; a
    /// part that another process writes, or that is damaged, keeps what it has.
    fn stored(&self, disk: &Disk, first: &WeightsId, open: bool) -> Vec<Stored> {
        let found = folder::parts_in(&disk.parts).into_iter();
        let each = found.map(|weights| {
            let path = Part::folder_in(&disk.parts, &weights);
            let used = self
                .open(&weights.0)
                .map(|open| (open.part, [open.for_chats, open.for_others].concat()));
            let may_open = open && !disk.reserved.contains(&weights.0);
            let used = used.or_else(|| {
                let part = may_open.then(|| Part::open(&path).ok()).flatten()?;
                Some((Arc::new(part), Vec::new()))
            });
            let mut stored = Stored {
                weights,
                taken: folder::disk_bytes(&path),
                awaited: 0,
                idle: 0,
                last_use_ms: folder::last_use_ms(&path),
                is_first: weights == *first,
                pieces: None,
            };
            if let Some((part, used)) = used {
                let idle = match part.is_shared() {
                    true => Vec::new(),
                    false => minus(&part.held(), &used),
                };
                // Ranges of layers share some pieces.
                let missing: BTreeSet<u32> = part.missing(&used).into_iter().flatten().collect();
                let missing: Vec<Range<u32>> = missing.into_iter().map(|at| at..at + 1).collect();
                stored.awaited = part.table().bytes(&missing);
                stored.idle = part.table().bytes(&idle);
                stored.pieces = Some((part, idle));
            }
            stored
        });
        each.collect()
    }

    /// Records that pieces of a part are in use, and makes room for those that are missing. Without
    /// room the use is as before.
    pub(super) fn reserve(
        &self,
        part: &Part,
        purpose: Purpose,
        wanted: &[Range<u32>],
        disk: &Disk,
    ) -> Result<GivenUp, NoRoom> {
        let _alone = self.room.lock();
        let weights = part.identity().weights;
        let before = self.set_use(&weights.0, purpose, wanted.to_vec());
        if part.missing(wanted).is_empty() {
            return Ok(Vec::new());
        }
        let made = self.make_room(&weights, disk);
        if made.is_err() {
            self.set_use(&weights.0, purpose, before);
        }
        made
    }

    fn make_room(&self, first: &WeightsId, disk: &Disk) -> Result<GivenUp, NoRoom> {
        let open = self.stored(disk, first, false);
        let budget = disk.budget(&open).map_err(NoRoom::Io)?;
        if all_bytes(&open) <= budget {
            return Ok(Vec::new());
        }
        let stored = self.stored(disk, first, true);
        let chosen = give_up(&stored, budget).map_err(|over| {
            let needed = stored.iter().filter(|part| part.is_first);
            let others = stored.iter().filter(|part| !part.is_first);
            let kept = others.map(|part| {
                let kept = part.taken.saturating_sub(part.idle);
                (part.weights, kept.saturating_add(part.awaited))
            });
            NoRoom::Full(Full {
                needed: needed.map(|part| part.awaited).sum(),
                budget,
                over,
                kept: kept.filter(|(_, bytes)| *bytes > 0).collect(),
            })
        })?;
        let mut given_up = Vec::new();
        for (stored, bytes) in chosen {
            if let Some((part, idle)) = &stored.pieces {
                let pieces = first_of(part, idle, bytes);
                part.evict(&pieces).map_err(NoRoom::Io)?;
                given_up.push((stored.weights, part.table().bytes(&pieces)));
            }
        }
        Ok(given_up)
    }

    /// Bytes that layers of a part may take on the disk for others, with those that are there. They
    /// are its share of what layers of so many models may take.
    pub(super) fn room_for_layers(
        &self,
        part: &Part,
        disk: &Disk,
        models: usize,
    ) -> io::Result<u64> {
        let _alone = self.room.lock();
        let weights = part.identity().weights;
        // The pieces that were served before may be evicted.
        self.set_use(&weights.0, Purpose::Others, Vec::new());
        self.room_of(weights, disk, models)
    }

    /// Whether the layers of a part that are served fit into its share, as by
    /// [`Self::room_for_layers`]. They stay in use.
    pub(super) fn keeps_layers(&self, part: &Part, disk: &Disk, models: usize) -> io::Result<bool> {
        let _alone = self.room.lock();
        let weights = part.identity().weights;
        if part.is_shared() {
            return Ok(true);
        }
        let served = self.set_use(&weights.0, Purpose::Others, Vec::new());
        let room = self.room_of(weights, disk, models);
        let bytes = part.table().bytes(&served);
        self.set_use(&weights.0, Purpose::Others, served);
        Ok(bytes <= room?)
    }

    fn room_of(&self, first: WeightsId, disk: &Disk, models: usize) -> io::Result<u64> {
        let stored = self.stored(disk, &first, true);
        let budget = disk.budget(&stored)?;
        let idle: u64 = stored.iter().map(|part| part.idle).sum();
        let left = budget.saturating_sub(all_bytes(&stored).saturating_sub(idle));
        let all = left.saturating_add(self.served_beside(&first.0));
        Ok((all / models.max(1) as u64).min(left))
    }
}

impl NoRoom {
    /// Error for the fetch of a model.
    pub(super) fn failure(&self, model: &Adoption, community: &Community) -> Failure {
        match self {
            Self::Io(error) => failure!(Host, "the disk of the parts cannot be used: {error}"),
            Self::Full(full) => full.failure(model, community),
        }
    }
}

impl Full {
    fn failure(&self, model: &Adoption, community: &Community) -> Failure {
        let kept = self.kept.iter().map(|(weights, kept)| {
            let known = community.model(&weights.0);
            let name = known.map_or_else(
                || format!("another part ({})", first_digits(&weights.0)),
                |model| model.name.clone(),
            );
            format!("; {name} keeps {}", bytes(*kept))
        });
        let kept: String = kept.collect();
        let name = &model.name;
        failure!(
            Host,
            "{name} needs {} on the disk, {} more than there is room for: parts of models may take {}{kept}",
            bytes(self.needed),
            bytes(self.over),
            bytes(self.budget),
        )
        .code("disk_budget")
        .hint(format!(
            "raise manners.disk_gb, free some space on the disk, set fewer private layers, or let an anchor \
             drop a model: `hearthnet model drop {name}`"
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use hearthnet_bus::testing;
    use hearthnet_testkit::{Adopted, TinyLlama, assert_matches};

    use super::*;
    use crate::models::adopted::adoption_for_test;

    fn stored(n: u8, taken: u64, awaited: u64, idle: u64, last_use_ms: u64) -> Stored {
        Stored {
            weights: WeightsId([n; 32]),
            taken,
            awaited,
            idle,
            last_use_ms,
            is_first: n == 0,
            pieces: None,
        }
    }

    #[test]
    fn the_fetched_model_gives_up_its_idle_pieces_first_and_then_the_least_recently_used() {
        let parts = [
            stored(1, 50, 0, 40, 7),
            stored(2, 50, 0, 30, 5),
            stored(0, 50, 20, 10, 9),
        ];
        let chosen = |budget| -> Result<Vec<(u8, u64)>, u64> {
            let chosen = give_up(&parts, budget)?;
            Ok(chosen
                .into_iter()
                .map(|(part, bytes)| (part.weights.0[0], bytes))
                .collect())
        };
        assert_eq!(chosen(170), Ok(vec![]));
        assert_eq!(chosen(165), Ok(vec![(0, 5)]));
        assert_eq!(chosen(150), Ok(vec![(0, 10), (2, 10)]));
        assert_eq!(chosen(90), Ok(vec![(0, 10), (2, 30), (1, 40)]));
        assert_eq!(chosen(87), Err(3));
    }

    #[test]
    fn pieces_in_use_are_cut_out_of_those_that_are_held() {
        assert_eq!(minus(&[0..10, 20..30], &[]), [0..10, 20..30]);
        let cuts = [3..5, 9..21, 25..25, 29..40, 50..60];
        assert_eq!(minus(&[0..10, 20..30], &cuts), [0..3, 5..9, 21..25, 25..29]);
        assert!(minus(&[4..6, 7..8], &[0..9, 1..2]).is_empty());
    }

    /// Whole part of a model of so many layers, with pieces larger than blocks of a disk.
    fn part(parts: &Path, layers: u32) -> Arc<Part> {
        let tiny = TinyLlama {
            layers,
            width: 256,
            ffn: 1536,
            vocab: 2048,
            ..TinyLlama::default()
        };
        let adopted = Adopted::of(tiny.file());
        let part = adopted.create_in(parts).unwrap();
        adopted.fetch(&part, &[part.table().all()]);
        Arc::new(part)
    }

    /// Disk with parts of a little more than its limit.
    fn full(parts: &Path) -> Disk {
        let all = folder::parts_in(parts).into_iter();
        let taken = all.map(|weights| folder::disk_bytes(&Part::folder_in(parts, &weights)));
        Disk {
            parts: parts.to_owned(),
            limit: Some(taken.sum::<u64>() - 100_000),
            reserved: BTreeSet::new(),
        }
    }

    #[test]
    fn room_is_made_from_pieces_that_are_not_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (part(dir.path(), 3), part(dir.path(), 4));
        let parts = Parts::default();
        for part in [&one, &two] {
            parts.add(part);
        }
        let id = |part: &Part| part.identity().weights;
        let table = two.table();
        let (head, layer) = (table.of_head(), table.of_layers(1, 1));
        parts.set_use(&id(&two).0, Purpose::Chats, head.clone());
        parts.set_use(&id(&one).0, Purpose::Chats, one.table().of_head());
        let disk = full(dir.path());
        // No piece is missing.
        let reserve = |wanted: &[Range<u32>]| parts.reserve(&two, Purpose::Others, wanted, &disk);
        assert_matches!(reserve(&layer), Ok(given) if given.is_empty());
        two.evict(&layer).unwrap();
        let all_of_one = one.held();
        let given = reserve(&layer).unwrap();
        assert_eq!(given.iter().map(|it| it.0).collect::<Vec<_>>(), [id(&two)]);
        assert_eq!(one.held(), all_of_one);
        assert!(two.missing(&head).is_empty());
        let others = [table.of_layers(0, 0), table.of_layers(2, 3)].concat();
        assert!(!two.missing(&others).is_empty());
        // All of it is wanted: the other part gives up what its chats do not need.
        let all = [table.all()];
        let given = reserve(&all).unwrap();
        assert_eq!(given.iter().map(|it| it.0).collect::<Vec<_>>(), [id(&one)]);
        assert!(one.held() != all_of_one);
        assert!(one.missing(&one.table().of_head()).is_empty());
        // A part that is whole and in use leaves no room.
        parts.end_use(&id(&two).0);
        parts.set_use(&id(&one).0, Purpose::Chats, all_of_one);
        let less = Disk {
            limit: Some(1 << 16),
            ..full(dir.path())
        };
        let error = parts.reserve(&two, Purpose::Others, &all, &less);
        assert_matches!(&error, Err(NoRoom::Full(full)) if full.over > 0 && full.needed > 0 && full.kept.len() == 1);
        let open = parts.open(&id(&two).0).unwrap();
        assert!(open.for_others.is_empty(), "the use is recorded");
    }

    #[test]
    fn a_full_disk_is_told_with_what_other_parts_keep_and_what_helps() {
        let home = testing::Home::founded(testing::key(1), true);
        let model = adoption_for_test("tiny", 3);
        let full = Full {
            needed: 30 << 20,
            budget: 20 << 20,
            over: 15 << 20,
            kept: vec![(WeightsId([7; 32]), 5 << 20)],
        };
        let said = full.failure(&model, &home.log.state());
        assert!(said.has_code("disk_budget"), "{said}");
        let text = said.to_string();
        for part in [
            "tiny needs 30.0 MiB on the disk, 15.0 MiB more than there is room for",
            "may take 20.0 MiB; another part (07070707) keeps 5.0 MiB",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let hint = said.hint_text().unwrap();
        assert!(hint.contains("manners.disk_gb") && hint.contains("model drop tiny"));
    }

    #[test]
    fn served_layers_of_several_models_stay_and_share_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (part(dir.path(), 3), part(dir.path(), 4));
        let parts = Parts::default();
        let id = |part: &Part| part.identity().weights;
        let layers = |part: &Part| part.table().of_layers(0, 1);
        for part in [&one, &two] {
            parts.add(part);
            parts.set_use(&id(part).0, Purpose::Others, layers(part));
        }
        let beside = parts.served_beside(&id(&two).0);
        assert_eq!(beside, one.table().bytes(&layers(&one)));
        let disk = full(dir.path());
        let keeps = |models| parts.keeps_layers(&two, &disk, models).unwrap();
        assert!(keeps(1) && !keeps(1000));
        let served = parts.open(&id(&two).0).unwrap().for_others;
        assert_eq!(served, layers(&two));
        let room = |models| parts.room_for_layers(&two, &disk, models).unwrap();
        let left = room(1);
        assert!(left > 0 && room(2) == left.min((left + beside) / 2));
        parts.end_serving(&id(&one).0);
        assert_eq!(parts.served_beside(&id(&two).0), 0);
        assert!(room(1) > left);
    }

    #[test]
    fn a_part_that_no_process_uses_is_given_up_and_one_that_is_about_to_be_opened_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (closed, two) = (part(dir.path(), 3), part(dir.path(), 4));
        let (weights, all) = (closed.identity().weights, closed.held());
        drop(closed);
        let parts = Parts::default();
        parts.add(&two);
        let wanted = [two.table().all()];
        two.evict(&two.table().of_layers(1, 1)).unwrap();
        let mut disk = full(dir.path());
        disk.reserved.insert(weights.0);
        let refused = parts.reserve(&two, Purpose::Chats, &wanted, &disk);
        assert_matches!(refused, Err(NoRoom::Full(_)));
        disk.reserved.clear();
        let given = parts.reserve(&two, Purpose::Chats, &wanted, &disk).unwrap();
        assert_eq!(given.iter().map(|it| it.0).collect::<Vec<_>>(), [weights]);
        let closed = Part::open(&Part::folder_in(dir.path(), &weights)).unwrap();
        assert!(closed.held() != all);
    }
}
