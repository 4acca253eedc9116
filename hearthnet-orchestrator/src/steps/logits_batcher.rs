//! Output head shared by several chats: rows that need logits at the same time run as one batch.
//!
//! The output matrix is read from memory once per batch, whatever its size, and this read is the
//! cost of a row. Leaders are chosen by [`batcher`](super::batcher). The logits of a row do not
//! depend on its batch.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearthnet_engine::bench::OtherMemory;
use hearthnet_engine::{EngineError, Head};
use hearthnet_files::ModelSpec;

use crate::steps::batcher::{AttendanceGuard, Batcher};
use crate::steps::chat_loop;
use crate::times::median;

/// Maximum rows per batch. Their logits are in memory at once, and above this number the arithmetic
/// of a row costs more than its share of reading the matrix.
const BATCH: usize = 32;

/// Embedding, final norm and output matrix of a model, for several chats.
#[derive(Debug)]
pub struct LogitsBatcher {
    head: Arc<Head>,
    batcher: Batcher<LogitsRequest, Result<Logits, EngineError>>,
}

/// Row that needs logits, and a buffer for them.
struct LogitsRequest {
    row: Vec<f32>,
    memory: Vec<f32>,
}

/// Logits of one row, as a range of its batch's logits.
pub struct Logits {
    all: Arc<Vec<f32>>,
    own: Range<usize>,
}

impl Logits {
    /// Logits by token id.
    pub fn values(&self) -> &[f32] {
        self.all.get(self.own.clone()).unwrap_or_default()
    }

    /// The buffer, if no other row of the batch still uses it; else an empty one.
    pub fn into_memory(self) -> Vec<f32> {
        Arc::try_unwrap(self.all).unwrap_or_default()
    }
}

impl From<Head> for LogitsBatcher {
    fn from(head: Head) -> Self {
        Self {
            head: Arc::new(head),
            batcher: Batcher::new(BATCH),
        }
    }
}

impl LogitsBatcher {
    pub fn spec(&self) -> &ModelSpec {
        self.head.spec()
    }

    /// Embeddings of tokens.
    ///
    /// # Errors
    /// As for [`Head::embed`].
    pub fn embed(&self, ids: &[u32], out: &mut Vec<f32>) -> Result<(), EngineError> {
        self.head.embed(ids, out)
    }

    /// Applies the last norm to outputs of the last layer.
    ///
    /// # Errors
    /// As for [`Head::norm`].
    pub fn norm(&self, rows: &mut [f32]) -> Result<(), EngineError> {
        self.head.norm(rows)
    }

    /// See [`Head::project`].
    pub fn project(&self, state: &mut [f32]) {
        self.head.project(state);
    }

    /// Time to embed a token and to compute logits from one row, as in a running chat: the median of
    /// five, after a run that warms up. So many bytes of other memory as `swept` are read before each
    /// run, as a chat reads its layers.
    ///
    /// # Errors
    /// As for [`Head::embed`] and [`Head::logits`].
    pub fn measure(&self, swept: u64) -> Result<Duration, EngineError> {
        let (mut row, mut logits) = (Vec::new(), Vec::new());
        let others = OtherMemory::new(swept);
        let mut times = Vec::new();
        for _ in 0..=5 {
            others.read();
            let begin = Instant::now();
            self.head.embed(&[0], &mut row)?;
            self.head.logits(&row, &mut logits)?;
            times.push(begin.elapsed());
        }
        Ok(median(times.into_iter().skip(1)).unwrap_or_default())
    }

    /// Registers a chat that will need logits. `hosted`: hosts compute its rows in between.
    pub fn attend(&self, hosted: bool) -> AttendanceGuard {
        self.batcher.attend(hosted)
    }

    /// Logits of several rows of one chat, `vocab` values per row, apart from those of other chats:
    /// these rows already share the read of the matrix.
    ///
    /// # Errors
    /// As for [`Head::logits`].
    pub async fn logits_of_rows(&self, rows: Vec<f32>) -> Result<Vec<f32>, EngineError> {
        let (head, own) = (Arc::clone(&self.head), Arc::new(rows));
        let rows = Arc::clone(&own);
        let work = move || logits_of(&head, &rows);
        if chat_loop::is_alone() {
            return work();
        }
        match tokio::task::spawn_blocking(work).await {
            Ok(logits) => logits,
            // The thread has panicked.
            Err(_) => logits_of(&self.head, &own),
        }
    }

    /// Logits of one row of `width` values, computed together with concurrent requests of other
    /// chats. `memory` is reused if possible. Waits for at most as many batches as there are chats
    /// before this one.
    ///
    /// # Errors
    /// As for [`Head::logits`], for this row alone.
    pub async fn logits(&self, row: Vec<f32>, memory: Vec<f32>) -> Result<Logits, EngineError> {
        if row.len() != self.head.spec().width as usize {
            // In a batch, it would shift the rows behind it.
            return compute_one(&self.head, row, memory);
        }
        let (head, copy) = (Arc::clone(&self.head), row.clone());
        let work = move |requests| compute(&head, requests);
        match self.batcher.run(LogitsRequest { row, memory }, work).await {
            Some(logits) => logits,
            // The leader has panicked.
            None => compute_one(&self.head, copy, Vec::new()),
        }
    }
}

fn logits_of(head: &Head, rows: &[f32]) -> Result<Vec<f32>, EngineError> {
    let mut logits = Vec::new();
    head.logits(rows, &mut logits)?;
    Ok(logits)
}

fn compute_one(head: &Head, row: Vec<f32>, mut memory: Vec<f32>) -> Result<Logits, EngineError> {
    head.logits(&row, &mut memory)?;
    Ok(Logits {
        own: 0..memory.len(),
        all: Arc::new(memory),
    })
}

fn compute(head: &Head, mut requests: Vec<LogitsRequest>) -> Vec<Result<Logits, EngineError>> {
    let count = requests.len();
    let memory = requests
        .first_mut()
        .map(|first| std::mem::take(&mut first.memory));
    let mut out = memory.unwrap_or_default();
    let rows: Vec<f32> = requests
        .iter()
        .flat_map(|request| request.row.iter().copied())
        .collect();
    if head.logits(&rows, &mut out).is_err() {
        // An invalid row must fail its own chat only.
        let each = requests
            .into_iter()
            .map(|request| compute_one(head, request.row, request.memory));
        return each.collect();
    }
    let (vocab, all) = (out.len() / count.max(1), Arc::new(out));
    let own = |n: usize| Logits {
        all: Arc::clone(&all),
        own: n * vocab..(n + 1) * vocab,
    };
    (0..count).map(|n| Ok(own(n))).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use futures_util::future::join_all;
    use hearthnet_files::ModelFile;
    use hearthnet_testkit::one_thread;

    use super::*;
    use crate::steps::chat_loop::block_on;
    use crate::tests::tiny_file;

    fn tiny() -> ModelFile {
        tiny_file(2)
    }

    fn head(file: &ModelFile) -> Head {
        Head::load(file, &one_thread()).unwrap()
    }

    fn bits(logits: &[f32]) -> Vec<u32> {
        logits.iter().map(|value| value.to_bits()).collect()
    }

    /// Compares many concurrent threads with a head of their own, in several rounds.
    fn in_company_as_alone(file: &ModelFile, rounds: u32) {
        const CHATS: u32 = 8;
        let (alone, shared) = (head(file), LogitsBatcher::from(head(file)));
        let together = Barrier::new(CHATS as usize);
        std::thread::scope(|scope| {
            for chat in 0..CHATS {
                let (alone, shared, together) = (&alone, &shared, &together);
                scope.spawn(move || {
                    let _present = shared.attend(true);
                    let (mut row, mut expected) = (Vec::new(), Vec::new());
                    for round in 0..rounds {
                        alone.embed(&[(chat * 37 + round) % 256], &mut row).unwrap();
                        alone.logits(&row, &mut expected).unwrap();
                        together.wait();
                        let got = block_on(shared.logits(row.clone(), Vec::new())).unwrap();
                        assert_eq!(
                            bits(got.values()),
                            bits(&expected),
                            "chat {chat}, round {round}"
                        );
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

    /// Results of rows that are ready at the same time.
    fn batches(shared: &LogitsBatcher, rows: &[&Vec<f32>]) -> Vec<Result<Vec<u32>, EngineError>> {
        let asks = rows.iter().map(|row| async {
            let logits = shared.logits((*row).clone(), Vec::new()).await?;
            Ok(bits(logits.values()))
        });
        block_on(join_all(asks))
    }

    #[test]
    fn a_row_that_cannot_be_computed_fails_its_own_chat_only() {
        let shared = LogitsBatcher::from(head(&tiny()));
        let mut good = Vec::new();
        shared.embed(&[1], &mut good).unwrap();
        let mut bad = good.clone();
        bad[3] = f32::NAN;
        let alone = block_on(shared.logits(good.clone(), Vec::new())).unwrap();

        let twice = [good.as_slice(), &good].concat();
        let twice = block_on(shared.logits_of_rows(twice)).unwrap();
        assert_eq!(
            bits(&twice),
            [bits(alone.values()), bits(alone.values())].concat()
        );
        // Six attending hosted chats allow a batch of three.
        let _present = [(); 6].map(|()| shared.attend(true));
        let results = batches(&shared, &[&good, &bad, &good]);
        assert_eq!(results[0].as_ref().unwrap(), &bits(alone.values()));
        assert!(matches!(results[1], Err(EngineError::InputNotFinite(0))));
        assert_eq!(results[2].as_ref().unwrap(), &bits(alone.values()));
    }

    #[test]
    fn a_batch_has_half_the_chats_that_alternate_with_hosts_and_all_that_do_not() {
        let shared = LogitsBatcher::from(head(&tiny()));
        let mut row = Vec::new();
        shared.embed(&[1], &mut row).unwrap();
        for (hosted, expected) in [(true, [2, 2, 2, 2]), (false, [4, 4, 4, 4])] {
            let _present = [(); 4].map(|()| shared.attend(hosted));
            let ask = || shared.logits(row.clone(), Vec::new());
            let logits = block_on(join_all([ask(), ask(), ask(), ask()]));
            let logits = logits.into_iter().map(Result::unwrap).collect::<Vec<_>>();
            // Logits of one batch share its buffer.
            let sizes: Vec<usize> = logits
                .iter()
                .map(|own| Arc::strong_count(&own.all))
                .collect();
            assert_eq!(sizes, expected);
        }
        assert!(shared.batcher.is_idle());
    }

    #[test]
    fn rows_of_another_width_are_refused_without_harm_to_others() {
        let shared = LogitsBatcher::from(head(&tiny()));
        assert!(block_on(shared.logits(vec![0.0; 3], Vec::new())).is_err());
        assert!(shared.batcher.is_idle());
    }
}
