//! One head for many chats: rows that want logits at the same time run as one batch.
//!
//! The output matrix is read from memory once per batch, whatever its size, and reading it is
//! what a row costs. Who computes for whom: [`batcher`](crate::batcher).
//!
//! A row's logits do not depend on its batch, so no chat can tell.

use std::ops::Range;
use std::sync::Arc;

use hearthnet_model::ModelSpec;
use hearthnet_model::engine::{EngineError, Head};

use crate::batcher::{Batcher, Present};
use crate::write_batch::WriteBatch;

/// Most rows of one batch: their logits are in memory at once, and beyond this many the
/// arithmetic of a row costs more than its share of reading the matrix.
const BATCH: usize = 32;

/// Embedding, last norm and output matrix of a model, for several chats.
#[derive(Debug)]
pub struct LogitsBatcher {
    head: Head,
    batcher: Batcher<Wish, Result<Logits, EngineError>>,
}

/// A row that wants logits, and memory that they may use.
struct Wish {
    row: Vec<f32>,
    out: Vec<f32>,
}

/// The logits of a batch, and which of them are meant.
struct Logits {
    all: Arc<Vec<f32>>,
    own: Range<usize>,
}

impl Logits {
    /// Every chat copies its own, so that nobody waits until all are copied.
    fn take(self) -> Vec<f32> {
        match Arc::try_unwrap(self.all) {
            Ok(mut all) => {
                all.truncate(self.own.end);
                all.drain(..self.own.start);
                all
            }
            Err(all) => all.get(self.own).unwrap_or_default().to_vec(),
        }
    }
}

impl From<Head> for LogitsBatcher {
    fn from(head: Head) -> Self {
        Self {
            head,
            batcher: Batcher::new(BATCH),
        }
    }
}

impl LogitsBatcher {
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
    pub fn attend(&self) -> Present {
        self.batcher.attend()
    }

    /// Replaces `out` by the logits of one row of `width` values: [`Head::logits`], together with
    /// the rows of other chats that want theirs now. `write_batch`: those whose rows came at the same
    /// time; the answer: those whose rows were computed together. Blocks for as many batches as
    /// there are chats before this one.
    ///
    /// # Errors
    /// Those of [`Head::logits`], for this row alone.
    pub fn logits(
        &self,
        row: &[f32],
        write_batch: Option<WriteBatch>,
        out: &mut Vec<f32>,
    ) -> Result<Option<WriteBatch>, EngineError> {
        let width = self.head.spec().width as usize;
        if row.len() != width {
            // It would shift the rows behind it.
            return self.head.logits(row, out).map(|()| None);
        }
        let wish = Wish {
            row: row.to_vec(),
            out: std::mem::take(out),
        };
        let work = |wishes| self.compute(wishes);
        let Some((logits, write_batch)) = self.batcher.run(wish, write_batch, true, work) else {
            // Whoever computed has panicked.
            return self.head.logits(row, out).map(|()| None);
        };
        *out = logits?.take();
        Ok(write_batch)
    }

    fn compute(&self, mut wishes: Vec<Wish>) -> Vec<Result<Logits, EngineError>> {
        let count = wishes.len();
        let mut out = wishes
            .first_mut()
            .map_or_else(Vec::new, |first| std::mem::take(&mut first.out));
        let done = match wishes.as_slice() {
            [alone] => self.head.logits(&alone.row, &mut out),
            several => {
                let rows = several.iter().flat_map(|wish| wish.row.iter().copied());
                self.head.logits(&rows.collect::<Vec<f32>>(), &mut out)
            }
        };
        match done {
            Ok(()) => {
                let (vocab, all) = (out.len() / count.max(1), Arc::new(out));
                let own = |n: usize| Logits {
                    all: Arc::clone(&all),
                    own: n * vocab..(n + 1) * vocab,
                };
                (0..count).map(|n| Ok(own(n))).collect()
            }
            Err(error) if count == 1 => vec![Err(error)],
            // A row that cannot be computed is the failure of its own chat only.
            Err(_) => wishes
                .into_iter()
                .flat_map(|wish| self.compute(vec![wish]))
                .collect(),
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
        shared: &LogitsBatcher,
        asks: [impl FnOnce() -> T + Send; N],
    ) -> [T; N] {
        let busy = shared.batcher.keep_busy();
        std::thread::scope(|scope| {
            let threads = asks.map(|ask| scope.spawn(ask));
            while shared.batcher.waiting() < N {
                std::thread::yield_now();
            }
            drop(busy);
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
        let (alone, shared) = (head(file), LogitsBatcher::from(head(file)));
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
        assert!(shared.batcher.is_idle());
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
        let shared = LogitsBatcher::from(head(&tiny()));
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
        assert!(matches!(results[1], Err(EngineError::InputNotFinite(0))));
        assert_eq!(results[2].as_ref().unwrap(), &bits(&expected));
    }

    #[test]
    fn who_was_computed_together_goes_on_in_a_write_batch() {
        let shared = LogitsBatcher::from(head(&tiny()));
        let mut row = Vec::new();
        shared.embed(&[1], &mut row).unwrap();
        let alone = shared.logits(&row, None, &mut Vec::new()).unwrap();
        assert!(alone.is_none());

        // Four chats, so batches of two; all four rows are there when the head is free.
        let _present = [(); 4].map(|()| shared.attend());
        let ask = || shared.logits(&row, Some(WriteBatch::default()), &mut Vec::new());
        let write_batches = all_waiting(&shared, [ask; 4]).map(|asked| asked.unwrap().unwrap());
        let mut companions: Vec<usize> = write_batches.iter().map(WriteBatch::members).collect();
        assert_eq!(companions, [2, 2, 2, 2]);
        companions.clear();
        let [first, rest @ ..] = write_batches;
        drop(first);
        companions.extend(rest.iter().map(WriteBatch::members));
        companions.sort_unstable();
        assert_eq!(companions, [1, 2, 2]);
        assert_eq!(
            rest.iter()
                .filter(|write_batch| write_batch.is_complete())
                .count(),
            1
        );
    }

    #[test]
    fn rows_of_another_width_are_refused_without_harm_to_others() {
        let shared = LogitsBatcher::from(head(&tiny()));
        let mut out = Vec::new();
        assert!(shared.logits(&[0.0; 3], None, &mut out).is_err());
        assert!(shared.batcher.is_idle());
    }
}
