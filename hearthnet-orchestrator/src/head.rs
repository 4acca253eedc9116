//! One head for many chats: rows that want logits at the same time run as one batch.
//!
//! The output matrix is read from memory once per batch, whatever its size, and reading it is
//! what a row costs. There is no thread for it: a chat that finds the head free computes for all
//! whose rows are there. Rows that come meanwhile wait; when the head is free again the first of
//! them does the same.
//!
//! ```text
//! A: gathers, runs a, b ──────────┐ logits to B, "go on" to C
//! B:    waits ....................└►
//! C:              waits ..........└► gathers, runs c, d ──────┐ logits to D
//! D:                 waits ...................................└►
//! ```
//!
//! A lone chat runs at once. Beside others it gathers first: rows that a host computed together
//! come one after the other, each brought by its own chat, and to begin without them costs them a
//! whole batch. A batch has the rows of half the chats at most: these are then with one host while
//! the others are with another. Whoever is in a batch leaves it in a [`Cohort`], and so they stay
//! together until they are back here.
//!
//! A row's logits do not depend on its batch, so no chat can tell.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hearthnet_model::ModelSpec;
use hearthnet_model::engine::{EngineError, Head};

use crate::cohort::Cohort;

/// Most rows of one batch: their logits are in memory at once, and beyond this many the
/// arithmetic of a row costs more than its share of reading the matrix.
const BATCH: usize = 32;

/// How long a batch waits for the next row of a burst, and how long in all.
const GAP: Duration = Duration::from_micros(100);
const GATHER: Duration = Duration::from_micros(400);

/// Embedding, last norm and output matrix of a model, for several chats.
#[derive(Debug)]
pub struct SharedHead {
    head: Head,
    desk: Mutex<Desk>,
    /// A row has come.
    came: Condvar,
    /// Chats that want logits now and then.
    present: AtomicUsize,
}

/// A chat's presence at the head, for as long as it answers.
#[derive(Debug)]
pub struct Present<'a>(&'a AtomicUsize);

impl Drop for Present<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Desk {
    /// Whether somebody computes, or has been told to.
    taken: bool,
    /// In order of arrival; the first is told to go on when the head is free.
    waiting: Vec<Waiting>,
    /// Whether whoever computes wants to know of rows that come.
    gathering: bool,
}

#[derive(Debug)]
struct Waiting {
    row: Vec<f32>,
    answer: SyncSender<Turn>,
}

/// What becomes of a row that waits.
enum Turn {
    /// Its chat computes, for itself and whoever else waits.
    GoOn,
    /// Somebody has computed it, and those of a cohort.
    Logits(Result<Vec<f32>, EngineError>, Option<Cohort>),
}

impl From<Head> for SharedHead {
    fn from(head: Head) -> Self {
        Self {
            head,
            desk: Mutex::default(),
            came: Condvar::new(),
            present: AtomicUsize::new(0),
        }
    }
}

impl SharedHead {
    /// Hyperparameters of the model.
    pub fn spec(&self) -> &ModelSpec {
        self.head.spec()
    }

    /// The embeddings of some tokens: [`Head::embed`].
    ///
    /// # Errors
    /// Those of [`Head::embed`].
    pub fn embed(&self, ids: &[u32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        self.head.embed(ids, out)
    }

    /// Says that a chat will want logits: whoever computes then waits a moment for its rows.
    pub fn attend(&self) -> Present<'_> {
        self.present.fetch_add(1, Ordering::Relaxed);
        Present(&self.present)
    }

    /// Replaces `out` by the logits of one row of `width` values: [`Head::logits`], together with
    /// the rows of other chats that want theirs now. `cohort`: those whose rows came at the same
    /// time; the answer: those whose rows were computed together. Blocks for as many batches as
    /// there are chats before this one.
    ///
    /// # Errors
    /// Those of [`Head::logits`], for this row alone.
    pub fn logits(
        &self,
        row: &[f32],
        cohort: Option<Cohort>,
        out: &mut Vec<f32>,
    ) -> Result<Option<Cohort>, EngineError> {
        let width = self.head.spec().width as usize;
        if row.len() != width {
            // It would shift the rows behind it.
            return self.head.logits(row, out).map(|()| None);
        }
        let mut desk = self.desk();
        if !desk.taken {
            desk.taken = true;
            drop(desk);
            return self.batch(row, 0, cohort, out);
        }
        let (answer, turn) = sync_channel(1);
        desk.waiting.push(Waiting {
            row: row.to_vec(),
            answer,
        });
        let gathering = desk.gathering;
        drop(desk);
        drop(cohort);
        if gathering {
            self.came.notify_one();
        }
        match turn.recv() {
            Ok(Turn::GoOn) => self.batch(row, 1, None, out),
            Ok(Turn::Logits(result, cohort)) => result.map(|logits| {
                *out = logits;
                cohort
            }),
            // Whoever computed has panicked.
            Err(_) => self.head.logits(row, out).map(|()| None),
        }
    }

    /// Computes a row and those of everybody who waits. `queued`: how many of these are the
    /// caller's own, 0 or 1; it is the first.
    fn batch(
        &self,
        own: &[f32],
        queued: usize,
        cohort: Option<Cohort>,
        out: &mut Vec<f32>,
    ) -> Result<Option<Cohort>, EngineError> {
        let free = WhenDone(self);
        let others = self.gather(queued, cohort.as_ref());
        drop(cohort);
        let mut rows = own.to_vec();
        for other in &others {
            rows.extend_from_slice(&other.row);
        }
        let result = self.head.logits(&rows, out);
        // The next batch does not wait for this one to be handed out.
        drop(free);
        if result.is_err() {
            // A row that cannot be computed is the failure of its own chat only.
            for other in others {
                let mut logits = Vec::new();
                let alone = self.head.logits(&other.row, &mut logits);
                // A chat waits until it is answered.
                let _ = other
                    .answer
                    .send(Turn::Logits(alone.map(|()| logits), None));
            }
            return self.head.logits(own, out).map(|()| None);
        }
        let cohort = (!others.is_empty()).then(Cohort::default);
        let vocab = out.len() / (others.len() + 1);
        for (other, logits) in others.iter().zip(out.chunks_exact(vocab.max(1)).skip(1)) {
            let _ = other
                .answer
                .send(Turn::Logits(Ok(logits.to_vec()), cohort.clone()));
        }
        out.truncate(vocab);
        Ok(cohort)
    }

    /// Waits for the rows of the caller's cohort, and a moment for those of others, until there are
    /// those of half the chats. Takes so many at most.
    fn gather(&self, queued: usize, cohort: Option<&Cohort>) -> Vec<Waiting> {
        let half = self.present.load(Ordering::Relaxed).div_ceil(2);
        let enough = half.clamp(1, BATCH);
        let began = Instant::now();
        let (mut last, mut rows) = (began, 0);
        let mut desk = self.desk();
        desk.gathering = true;
        loop {
            let now = desk.waiting.len() + 1 - queued;
            if now > rows {
                (last, rows) = (Instant::now(), now);
            }
            let all_came = cohort.is_none_or(Cohort::is_complete) && last.elapsed() >= GAP;
            if rows >= enough || all_came || began.elapsed() >= GATHER {
                desk.gathering = false;
                let taken = now.min(enough) - 1 + queued;
                return desk.waiting.drain(..taken).skip(queued).collect();
            }
            let waited = self.came.wait_timeout(desk, GAP);
            desk = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frees the head when it goes, whatever became of the work, and tells the first who waits.
struct WhenDone<'a>(&'a SharedHead);

impl Drop for WhenDone<'_> {
    fn drop(&mut self) {
        let mut desk = self.0.desk();
        match desk.waiting.first() {
            // There is room for one message, and this is the first.
            Some(first) => drop(first.answer.try_send(Turn::GoOn)),
            None => desk.taken = false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use hearthnet_model::ModelFile;
    use hearthnet_model::engine::EngineOptions;
    use hearthnet_model::gguf::Gguf;
    use hearthnet_testkit::TinyLlama;

    use super::*;

    fn tiny() -> ModelFile {
        let bytes = TinyLlama::default().bytes();
        ModelFile::from_gguf(Gguf::from_bytes(bytes).unwrap()).unwrap()
    }

    /// Asks on threads of their own; the head is free when all rows are there.
    fn all_waiting<T: Send, const N: usize>(
        shared: &SharedHead,
        asks: [impl FnOnce() -> T + Send; N],
    ) -> [T; N] {
        shared.desk().taken = true;
        std::thread::scope(|scope| {
            let threads = asks.map(|ask| scope.spawn(ask));
            while shared.desk().waiting.len() < N {
                std::thread::yield_now();
            }
            drop(WhenDone(shared));
            threads.map(|thread| thread.join().unwrap())
        })
    }

    fn head(file: &ModelFile) -> Head {
        let options = EngineOptions {
            threads: 1,
            ..EngineOptions::default()
        };
        Head::load(file, &options).unwrap()
    }

    fn bits(logits: &[f32]) -> Vec<u32> {
        logits.iter().map(|value| value.to_bits()).collect()
    }

    /// Many threads at once, many times, against a head of one's own.
    fn in_company_as_alone(file: &ModelFile, rounds: u32) {
        const CHATS: u32 = 8;
        let (alone, shared) = (head(file), SharedHead::from(head(file)));
        let together = Barrier::new(CHATS as usize);
        std::thread::scope(|scope| {
            for chat in 0..CHATS {
                let (alone, shared, together) = (&alone, &shared, &together);
                scope.spawn(move || {
                    let _present = shared.attend();
                    let (mut row, mut expected, mut got) = (Vec::new(), Vec::new(), Vec::new());
                    for round in 0..rounds {
                        alone.embed(&[(chat * 37 + round) % 256], &mut row).unwrap();
                        alone.logits(&row, &mut expected).unwrap();
                        together.wait();
                        shared.logits(&row, None, &mut got).unwrap();
                        assert_eq!(bits(&got), bits(&expected), "chat {chat}, round {round}");
                    }
                });
            }
        });
        let desk = shared.desk();
        assert!(!desk.taken && desk.waiting.is_empty());
    }

    #[test]
    fn a_row_has_the_same_logits_in_company_as_alone() {
        in_company_as_alone(&tiny(), 200);
    }

    #[test]
    fn the_real_model_says_the_same_in_company_as_alone() {
        in_company_as_alone(&ModelFile::open(&hearthnet_testkit::smollm2()).unwrap(), 3);
    }

    /// Rows that wait while the head is taken, computed in one batch by the first of them.
    #[test]
    fn a_row_that_cannot_be_computed_fails_its_own_chat_only() {
        let shared = SharedHead::from(head(&tiny()));
        let mut good = Vec::new();
        shared.embed(&[1], &mut good).unwrap();
        let mut bad = good.clone();
        bad[3] = f32::NAN;
        let mut expected = Vec::new();
        shared.logits(&good, None, &mut expected).unwrap();

        // A batch of three out of six.
        let _present = [(); 6].map(|()| shared.attend());
        let asks = [&good, &bad, &good].map(|row| {
            || {
                let mut out = Vec::new();
                shared.logits(row, None, &mut out).map(|_| bits(&out))
            }
        });
        let results = all_waiting(&shared, asks);
        assert_eq!(results[0].as_ref().unwrap(), &bits(&expected));
        assert!(matches!(
            results[1],
            Err(EngineError::InputNotFinite { row: 0 })
        ));
        assert_eq!(results[2].as_ref().unwrap(), &bits(&expected));
    }

    #[test]
    fn who_was_computed_together_goes_on_in_a_cohort() {
        let shared = SharedHead::from(head(&tiny()));
        let mut row = Vec::new();
        shared.embed(&[1], &mut row).unwrap();
        let alone = shared.logits(&row, None, &mut Vec::new()).unwrap();
        assert!(alone.is_none());

        // Four chats, so batches of two; all four rows are there when the head is free.
        let _present = [(); 4].map(|()| shared.attend());
        let ask = || shared.logits(&row, Some(Cohort::default()), &mut Vec::new());
        let cohorts = all_waiting(&shared, [ask; 4]).map(|asked| asked.unwrap().unwrap());
        let mut companions: Vec<usize> = cohorts.iter().map(Cohort::members).collect();
        assert_eq!(companions, [2, 2, 2, 2]);
        companions.clear();
        let [first, rest @ ..] = cohorts;
        drop(first);
        companions.extend(rest.iter().map(Cohort::members));
        companions.sort_unstable();
        assert_eq!(companions, [1, 2, 2]);
        assert_eq!(rest.iter().filter(|cohort| cohort.is_complete()).count(), 1);
    }

    #[test]
    fn rows_of_another_width_are_refused_without_harm_to_others() {
        let shared = SharedHead::from(head(&tiny()));
        let mut out = Vec::new();
        assert!(shared.logits(&[0.0; 3], None, &mut out).is_err());
        assert!(!shared.desk().taken);
    }
}
