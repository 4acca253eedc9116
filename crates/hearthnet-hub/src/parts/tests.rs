//! Fetches from sources in memory.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use hearthnet_files::FileError;
use hearthnet_files::manifest::Digest;
use hearthnet_files::part::{PartError, Piece};
use parking_lot::Mutex;

use super::error::{FetchError, Why};
use super::fetch::{FetchOptions, Progress, Report, Sink, fetch_into};
use super::source::{PieceSource, Rank, SourceError};

const LEN: u32 = 1000;

fn bytes_of(index: u32) -> Vec<u8> {
    index.to_le_bytes().repeat(LEN as usize / 4)
}

/// Pieces with gaps of 32 bytes after every tenth.
fn pieces(count: u32) -> Vec<Piece> {
    let piece = |index: u32| Piece {
        index,
        offset: u64::from(index * LEN + index / 10 * 32),
        len: LEN,
        sha256: Digest::of(&bytes_of(index)),
    };
    (0..count).map(piece).collect()
}

/// Store in memory; the pieces are held after the next sync.
#[derive(Default)]
struct Memory {
    written: Mutex<BTreeMap<u32, Vec<u8>>>,
    held: Mutex<BTreeMap<u32, Vec<u8>>>,
    /// Number of pieces that fit, if limited.
    room: Option<usize>,
}

impl Sink for Memory {
    fn write(&self, index: u32, bytes: &[u8]) -> Result<(), PartError> {
        if bytes != bytes_of(index) {
            return Err(PartError::Mismatch(format!("piece {index}")));
        }
        let mut written = self.written.lock();
        if self.room == Some(written.len()) {
            let full = io::Error::from(io::ErrorKind::StorageFull);
            return Err(FileError::new("write", "model.gguf".as_ref(), full).into());
        }
        assert!(
            written.insert(index, bytes.to_vec()).is_none(),
            "piece {index} is written twice"
        );
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        *self.held.lock() = self.written.lock().clone();
        Ok(())
    }

    fn free(&self) -> Option<u64> {
        None
    }
}

/// Source in memory.
struct Fake {
    name: &'static str,
    rank: Rank,
    has: Box<dyn Fn() -> Vec<Range<u32>> + Send + Sync>,
    read: Box<dyn Fn(&[Piece]) -> ReadResult + Send + Sync>,
    reads: AtomicU32,
}

type ReadResult = Result<Option<Vec<u8>>, SourceError>;

impl Fake {
    /// `has` returns the pieces of the source at each call. It may block.
    fn changing(
        name: &'static str,
        rank: Rank,
        has: impl Fn() -> Vec<Range<u32>> + Send + Sync + 'static,
        read: impl Fn(&[Piece]) -> ReadResult + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            rank,
            has: Box::new(has),
            read: Box::new(read),
            reads: AtomicU32::new(0),
        })
    }

    fn new(
        name: &'static str,
        rank: Rank,
        has: Range<u32>,
        read: impl Fn(&[Piece]) -> ReadResult + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::changing(name, rank, move || vec![has.clone()], read)
    }

    fn honest(name: &'static str, rank: Rank, has: Range<u32>) -> Arc<Self> {
        Self::new(name, rank, has, |run| Ok(Some(all_of(run))))
    }

    fn reads(&self) -> u32 {
        self.reads.load(Ordering::Relaxed)
    }
}

fn all_of(run: &[Piece]) -> Vec<u8> {
    run.iter().flat_map(|piece| bytes_of(piece.index)).collect()
}

impl PieceSource for Fake {
    fn name(&self) -> String {
        self.name.to_owned()
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn pieces(&self) -> Result<Vec<Range<u32>>, SourceError> {
        Ok((self.has)())
    }

    fn lanes(&self) -> usize {
        2
    }

    fn run(&self) -> u32 {
        4
    }

    fn read(&self, run: &[Piece]) -> ReadResult {
        self.reads.fetch_add(1, Ordering::Relaxed);
        (self.read)(run)
    }
}

fn options() -> FetchOptions {
    FetchOptions {
        poll: Duration::from_millis(20),
        patience: Duration::from_millis(500),
        backoff: Duration::from_millis(1),
        sync: Duration::from_millis(5),
        ..FetchOptions::default()
    }
}

fn get(memory: &Memory, count: u32, sources: &[Arc<Fake>]) -> Result<Report, FetchError> {
    with(memory, count, sources, &options())
}

fn with(
    memory: &Memory,
    count: u32,
    sources: &[Arc<Fake>],
    options: &FetchOptions,
) -> Result<Report, FetchError> {
    let sources = sources
        .iter()
        .map(|source| Arc::clone(source) as Arc<dyn PieceSource>);
    let stop = AtomicBool::new(false);
    fetch_into(
        memory,
        pieces(count),
        sources.collect(),
        options,
        &|_| {},
        &stop,
    )
}

fn sent(report: &Report, name: &str) -> u64 {
    report
        .bytes
        .iter()
        .find(|(source, _)| source == name)
        .unwrap()
        .1
}

fn assert_whole(memory: &Memory, count: u32) {
    let held = memory.held.lock();
    assert!((0..count).eq(held.keys().copied()));
}

#[test]
fn pieces_of_partial_neighbours_and_the_hub_make_a_whole_without_waste() {
    let memory = Memory::default();
    let sources = [
        Fake::honest("a", Rank::Neighbour, 0..150),
        Fake::honest("b", Rank::Neighbour, 50..200),
        Fake::honest("hub", Rank::Hub, 0..u32::MAX),
    ];
    let report = get(&memory, 300, &sources).unwrap();
    assert_whole(&memory, 300);
    let total: u64 = report.bytes.iter().map(|(_, bytes)| bytes).sum();
    assert!(total * 100 <= 300 * u64::from(LEN) * 102, "{report:?}");
    assert!(report.dropped.is_empty(), "{report:?}");
}

#[test]
fn a_liar_is_named_and_its_pieces_come_from_another_source() {
    let memory = Memory::default();
    let liar = Fake::new("liar", Rank::Neighbour, 0..100, |run| {
        let mut bytes = all_of(run);
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        Ok(Some(bytes))
    });
    let sources = [liar, Fake::honest("hub", Rank::Hub, 0..u32::MAX)];
    let report = get(&memory, 100, &sources).unwrap();
    assert_whole(&memory, 100);
    let liars: Vec<_> = report
        .dropped
        .iter()
        .map(|it| (&*it.source, it.is_liar()))
        .collect();
    assert_eq!(liars, [("liar", true)]);
    // Two reads in flight, and the one that was given to the lane of the first.
    assert!(sources[0].reads() <= 3, "{}", sources[0].reads());
}

#[test]
fn a_source_that_always_lacks_what_it_offers_ends_the_fetch() {
    let memory = Memory::default();
    let empty = Fake::new("empty", Rank::Neighbour, 0..40, |_| Ok(None));
    let error = get(&memory, 40, &[Arc::clone(&empty)]).unwrap_err();
    assert!(
        matches!(&error, FetchError::NoSource { missing_bytes: 40_000, asked } if asked.len() == 1),
        "{error}"
    );
    // Two lanes, and six failures.
    assert!(empty.reads() <= 12, "{}", empty.reads());
}

#[test]
fn a_neighbour_that_grows_is_waited_for() {
    let memory = Memory::default();
    let end = Arc::new(AtomicU32::new(10));
    let held = Arc::clone(&end);
    let has = move || std::iter::once(0..held.load(Ordering::Relaxed)).collect();
    let grows = Fake::changing("grows", Rank::Neighbour, has, |run| Ok(Some(all_of(run))));
    let growing = std::thread::spawn(move || {
        for more in 11..=40 {
            std::thread::sleep(Duration::from_millis(10));
            end.store(more, Ordering::Relaxed);
        }
    });
    get(&memory, 40, &[grows]).unwrap();
    growing.join().unwrap();
    assert_whole(&memory, 40);
}

#[test]
fn a_neighbour_that_dies_in_the_middle_is_replaced() {
    let memory = Memory::default();
    let left = AtomicU32::new(5);
    let dies = Fake::new("dies", Rank::Neighbour, 0..100, move |run| {
        let alive = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
        match alive {
            Ok(_) => Ok(Some(all_of(run))),
            Err(_) => Err(SourceError::Unavailable(
                "the connection broke off".to_owned(),
            )),
        }
    });
    let sources = [dies, Fake::honest("hub", Rank::Hub, 0..u32::MAX)];
    let report = get(&memory, 100, &sources).unwrap();
    assert_whole(&memory, 100);
    assert!(
        sent(&report, "dies") > 0 && sent(&report, "hub") > 0,
        "{report:?}"
    );
}

#[test]
fn a_source_that_keeps_failing_is_dropped_with_its_error() {
    let memory = Memory::default();
    let broken = Fake::new("broken", Rank::Hub, 0..10, |_| {
        Err(SourceError::Unavailable("no network".to_owned()))
    });
    let error = get(&memory, 10, &[broken]).unwrap_err();
    assert!(error.to_string().contains("broken: no network"), "{error}");
}

#[test]
fn a_failure_that_a_lane_notices_after_another_has_recovered_is_waited_for() {
    let memory = Memory::default();
    let (started, fourth) = (AtomicU32::new(0), Barrier::new(2));
    let source = Fake::new("hub", Rank::Hub, 0..u32::MAX, move |run| {
        let number = started.fetch_add(1, Ordering::Relaxed);
        // The second read ends when the fourth starts, which is after the third has delivered.
        if number == 1 || number == 3 {
            fourth.wait();
        }
        match number {
            0 | 1 => Err(SourceError::Unavailable("it is busy".to_owned())),
            _ => Ok(Some(all_of(run))),
        }
    });
    let report = get(&memory, 40, &[source]).unwrap();
    assert_whole(&memory, 40);
    assert!(report.dropped.is_empty(), "{report:?}");
}

#[test]
fn a_silent_source_delays_only_its_pieces() {
    let memory = Memory::default();
    let silent = Fake::new("silent", Rank::Neighbour, 0..100, |_| {
        std::thread::sleep(Duration::from_secs(60));
        Ok(None)
    });
    let sources = [silent, Fake::honest("hub", Rank::Hub, 0..u32::MAX)];
    let options = FetchOptions {
        stall: Duration::from_millis(50),
        longest_read: Duration::from_millis(400),
        patience: Duration::from_secs(20),
        ..options()
    };
    let report = with(&memory, 100, &sources, &options).unwrap();
    assert_whole(&memory, 100);
    assert_eq!(sent(&report, "hub"), 100 * u64::from(LEN));
}

#[test]
fn a_full_disk_ends_the_fetch_and_keeps_what_is_stored() {
    let memory = Memory {
        room: Some(7),
        ..Memory::default()
    };
    let error = get(&memory, 20, &[Fake::honest("a", Rank::Local, 0..20)]).unwrap_err();
    assert!(
        matches!(error, FetchError::DiskFull { needed: 13_000, .. }),
        "{error}"
    );
    assert_eq!(error.code(), "disk_full");
    assert_eq!(memory.held.lock().len(), 7);
}

#[test]
fn a_stop_does_not_wait_for_a_silent_source() {
    let memory = Memory::default();
    let stop = AtomicBool::new(false);
    let silent = Fake::new("silent", Rank::Neighbour, 0..10, |_| {
        loop {
            std::thread::park();
        }
    });
    let source: Arc<dyn PieceSource> = Arc::<Fake>::clone(&silent);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while silent.reads() == 0 {
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
        });
        let result = fetch_into(
            &memory,
            pieces(10),
            vec![source],
            &options(),
            &|_| {},
            &stop,
        );
        assert!(matches!(result, Err(FetchError::Stopped)), "{result:?}");
    });
}

#[test]
fn a_mismatch_of_the_hub_says_that_its_file_is_not_the_adopted_one() {
    let memory = Memory::default();
    let other = Fake::new("hub", Rank::Hub, 0..u32::MAX, |run| {
        Ok(Some(vec![7; run.len() * LEN as usize]))
    });
    let said = Mutex::new(Vec::new());
    let news = |progress: Progress<'_>| {
        if let Progress::Dropped(dropped) = progress {
            assert!(matches!(dropped.why, Why::Mismatch(_)));
            said.lock().push(dropped.to_string());
        }
    };
    let stop = AtomicBool::new(false);
    let result = fetch_into(&memory, pieces(10), vec![other], &options(), &news, &stop);
    assert!(matches!(result, Err(FetchError::NoSource { .. })));
    let said = said.lock();
    assert!(
        said.len() == 1 && said[0].contains("is not the adopted model"),
        "{said:?}"
    );
}

/// Source that gives what a store holds.
fn shared(store: &Arc<Memory>) -> Arc<Fake> {
    let (offers, gives) = (Arc::clone(store), Arc::clone(store));
    let has = move || {
        let held = offers.held.lock();
        held.keys().map(|&index| index..index + 1).collect()
    };
    Fake::changing("fetcher", Rank::Neighbour, has, move |run| {
        let held = gives.held.lock();
        let each = run.iter().map(|piece| held.get(&piece.index).cloned());
        Ok(each.collect::<Option<Vec<_>>>().map(|each| each.concat()))
    })
}

#[test]
fn three_nodes_that_fetch_from_each_other_are_all_complete() {
    const COUNT: u32 = 200;
    let stores: Vec<Arc<Memory>> = (0..3).map(|_| Arc::default()).collect();
    // All nodes share the seeder's uplink.
    let uplink = Mutex::new(());
    let seeder = Fake::new("seeder", Rank::Neighbour, 0..COUNT, move |run| {
        let _busy = uplink.lock();
        std::thread::sleep(Duration::from_millis(1));
        Ok(Some(all_of(run)))
    });
    std::thread::scope(|scope| {
        let fetchers: Vec<_> = (0..3)
            .map(|me| {
                let others = stores.iter().enumerate().filter(|(at, _)| *at != me);
                let others = others.map(|(_, store)| shared(store));
                let first = std::iter::once(Arc::clone(&seeder));
                let sources: Vec<_> = first.chain(others).collect();
                let options = FetchOptions {
                    seed: me as u64,
                    patience: Duration::from_secs(20),
                    ..options()
                };
                let store = &stores[me];
                scope.spawn(move || with(store, COUNT, &sources, &options))
            })
            .collect();
        for fetcher in fetchers {
            fetcher.join().unwrap().unwrap();
        }
    });
    stores.iter().for_each(|store| assert_whole(store, COUNT));
}

#[test]
fn a_source_has_at_most_as_many_reads_as_lanes() {
    let memory = Memory::default();
    let reading = AtomicU32::new(0);
    let source = Fake::new("a", Rank::Neighbour, 0..200, move |run| {
        let others = reading.fetch_add(1, Ordering::SeqCst);
        std::thread::yield_now();
        reading.fetch_sub(1, Ordering::SeqCst);
        match others {
            0 | 1 => Ok(Some(all_of(run))),
            _ => Err(SourceError::Unusable("too many reads".to_owned())),
        }
    });
    get(&memory, 200, &[source]).unwrap();
    assert_whole(&memory, 200);
}

/// Neighbour with 100 pieces. It does not list them before `until` is true.
fn late(until: Arc<AtomicBool>) -> Arc<Fake> {
    let has = move || {
        while !until.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::iter::once(0..100).collect()
    };
    Fake::changing("late", Rank::Neighbour, has, |run| Ok(Some(all_of(run))))
}

#[test]
fn a_neighbour_that_does_not_answer_delays_the_hub_only_for_its_head_start() {
    let memory = Memory::default();
    let hub_reads = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&hub_reads);
    let hub = Fake::new("hub", Rank::Hub, 0..u32::MAX, move |run| {
        seen.store(true, Ordering::Relaxed);
        Ok(Some(all_of(run)))
    });
    let late = late(hub_reads);
    let waited = AtomicBool::new(false);
    let news = |progress: Progress<'_>| {
        if let Progress::Waiting { .. } = progress {
            waited.store(true, Ordering::Relaxed);
        }
    };
    let options = FetchOptions {
        patience: Duration::from_secs(20),
        ..options()
    };
    let stop = AtomicBool::new(false);
    fetch_into(
        &memory,
        pieces(100),
        vec![hub, late],
        &options,
        &news,
        &stop,
    )
    .unwrap();
    assert_whole(&memory, 100);
    assert!(
        !waited.load(Ordering::Relaxed),
        "the late source had not answered"
    );
}

#[test]
fn bytes_of_failed_reads_are_counted() {
    let memory = Memory::default();
    let failed = AtomicBool::new(false);
    let source = Fake::new("hub", Rank::Hub, 0..u32::MAX, move |run| {
        if failed.swap(true, Ordering::Relaxed) {
            return Ok(Some(all_of(run)));
        }
        let error = crate::pull::SourceError::Interrupted {
            done: 123,
            total: 4000,
            reason: String::new(),
        };
        Err(error.into())
    });
    let report = get(&memory, 20, &[source]).unwrap();
    assert_eq!(sent(&report, "hub"), 20 * u64::from(LEN) + 123);
}

#[test]
fn a_source_that_lacks_one_piece_gives_all_others() {
    let memory = Memory::default();
    let lacks = Fake::new("lacks", Rank::Local, 0..40, |run| {
        let whole = run.iter().all(|piece| piece.index != 7);
        Ok(whole.then(|| all_of(run)))
    });
    let error = get(&memory, 40, &[lacks]).unwrap_err();
    assert!(
        matches!(
            error,
            FetchError::NoSource {
                missing_bytes: 1000,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(memory.held.lock().len(), 39);
}

#[test]
fn a_neighbour_that_answers_late_still_spares_the_hub() {
    let memory = Memory::default();
    let until = Arc::new(AtomicBool::new(false));
    let hub = Fake::honest("hub", Rank::Hub, 0..u32::MAX);
    let sources = [Arc::clone(&hub), late(Arc::clone(&until))];
    let answers = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        until.store(true, Ordering::Relaxed);
    });
    get(&memory, 100, &sources).unwrap();
    answers.join().unwrap();
    assert_whole(&memory, 100);
    assert_eq!(hub.reads(), 0);
}
