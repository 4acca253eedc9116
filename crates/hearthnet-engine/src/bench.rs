//! Speed of the engine: the library part of `hearthnet bench engine`.
//!
//! The two figures are those of `llama-bench`: *prefill*, tokens per second of a prompt in one
//! batch, and *decode*, tokens per second when each token is a step of its own, including logits.
//! Loading, tokenising and sampling are not timed.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hearthnet_files::ModelFile;
use hearthnet_files::gguf::type_uses;
use hearthnet_files::spec::CacheDtype;
use hearthnet_platform::hardware::cpu_name;
use serde::{Deserialize, Serialize};

use crate::kernels::{Arena, F16Buffer, Isa};
use crate::{Backend, Engine, EngineError, EngineOn, EngineOptions, Head, LoadError, SeqId, Span};

/// Settings of a benchmark.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BenchOptions {
    /// Thread counts, each measured separately.
    pub threads: Vec<usize>,
    /// Prompt lengths in tokens, each measured separately.
    pub prefill: Vec<u32>,
    /// Tokens to decode; 0 skips this measurement.
    pub decode: u32,
    /// Sequence lengths at the start of decoding, each measured separately.
    pub depths: Vec<u32>,
    /// Numbers of sequences that decode together, each measured separately.
    pub batches: Vec<u32>,
    /// Runs per measurement, after a warm-up run. The median is reported.
    pub repetitions: u32,
    pub isa: Isa,
    /// Number format of keys and values.
    pub cache: CacheDtype,
}

impl Default for BenchOptions {
    /// Prefill 512, decode 64 at depth 0 in one sequence, five times, with one thread and with one
    /// per core.
    fn default() -> Self {
        let all = EngineOptions::default().threads;
        let mut threads = vec![1, all];
        threads.dedup();
        Self {
            threads,
            prefill: vec![512],
            decode: 64,
            depths: vec![0],
            batches: vec![1],
            repetitions: 5,
            isa: Isa::detect(),
            cache: CacheDtype::F16,
        }
    }
}

/// Report of a benchmark.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct EngineBench {
    pub version: String,
    /// Name of the processor according to the system; empty if unknown.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Arithmetic of the layers, named as in descriptors.
    pub engine: String,
    /// Instruction set of the exact engine's kernels, which always compute the logits.
    pub isa: String,
    /// Number format of keys and values.
    pub cache: CacheDtype,
    pub file: PathBuf,
    pub architecture: String,
    /// Types of the matrices in the blocks, sorted by bytes, largest first.
    pub weight_types: Vec<String>,
    /// Memory of the weights, in bytes.
    pub weight_bytes: u64,
    /// Bytes of weights read per token when one sequence decodes, including the logits.
    pub token_bytes: u64,
    /// Seconds for loading and repacking; depends on whether the file is in the system's cache.
    pub load_seconds: f64,
    /// In the order of the options.
    pub results: Vec<BenchResult>,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BenchResult {
    pub test: BenchTest,
    pub threads: usize,
    /// Timed tokens per sequence.
    pub tokens: u32,
    /// Sequences in a batch.
    pub batch: u32,
    /// Positions before the first timed token.
    pub depth: u32,
    /// Median of `samples`.
    pub tokens_per_second: f64,
    /// Tokens per second of each repetition, over all sequences, in order.
    pub samples: Vec<f64>,
    /// Bytes per second of a streaming read with the same threads: the median of a read before each
    /// repetition and one after the last, because neighbours of a virtual machine change it within
    /// seconds.
    pub memory_bandwidth: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchTest {
    /// Many tokens in one batch.
    Prefill,
    /// Single tokens, one after another.
    Decode,
}

/// Measures a model file on the exact engine. `progress` receives short descriptions of the current
/// step.
///
/// # Errors
/// The file is not a loadable model, or the engine refuses a batch, most likely because the prompt
/// exceeds the context.
pub fn bench_engine(
    path: &Path,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<EngineBench, Box<dyn Error>> {
    bench_layers(
        path,
        crate::ARITHMETIC,
        options,
        progress,
        |file, options| {
            let layers = Engine::load(file, 0..file.spec().layers, options, &mut |_, _| ())?;
            let head = Head::beside(file, &layers)?;
            Ok((layers, head))
        },
    )
}

/// Measures a model file on any engine; `engine` is its name in the report. `load` receives the
/// options that the exact engine would have. `progress` is used as in [`bench_engine`].
///
/// # Errors
/// As [`bench_engine`].
pub fn bench_layers<B: Backend>(
    path: &Path,
    engine: &str,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
    mut load: impl FnMut(&ModelFile, &EngineOptions) -> Result<(EngineOn<B>, Head), Box<dyn Error>>,
) -> Result<EngineBench, Box<dyn Error>> {
    let file = ModelFile::open(path)?.with_cache(options.cache)?;
    let mut bench = EngineBench {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpu: cpu_name(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        engine: engine.to_owned(),
        isa: options.isa.name().to_owned(),
        cache: options.cache,
        file: path.to_owned(),
        architecture: file.spec().architecture.clone(),
        weight_types: weight_types(&file),
        weight_bytes: 0,
        token_bytes: 0,
        load_seconds: 0.0,
        results: Vec::new(),
    };
    let stream = Stream::new()?;
    for &threads in &options.threads {
        progress(&format!("loading for {threads} threads"));
        let begin = Instant::now();
        let engine = EngineOptions {
            threads,
            isa: options.isa,
            // As many as the longest measurement needs, whatever the budget.
            max_kv_bytes: u64::MAX,
            ..EngineOptions::default()
        };
        let (layers, head) = load(&file, &engine)?;
        bench.load_seconds = begin.elapsed().as_secs_f64();
        bench.weight_bytes = layers.weight_bytes() + head.weight_bytes();
        bench.token_bytes = layers.token_bytes() + head.token_bytes();
        let mut measured = Measured {
            layers,
            head,
            rows: Vec::new(),
            logits: Vec::new(),
        };
        for mut result in tests(options, threads) {
            let BenchResult {
                test,
                tokens,
                batch,
                depth,
                ..
            } = result;
            progress(&format!(
                "{test:?} of {tokens} in {batch} at depth {depth}, {threads} threads"
            ));
            let mut reads = Vec::new();
            let times = measured.run(&result, options.repetitions, || {
                reads.push(stream.read(threads));
            })?;
            result.memory_bandwidth = median(&reads);
            let all = f64::from(tokens) * f64::from(batch);
            result.samples = times.iter().map(|time| all / time.as_secs_f64()).collect();
            result.tokens_per_second = median(&result.samples);
            bench.results.push(result);
        }
    }
    Ok(bench)
}

/// All measurements for one number of threads, without results.
fn tests(options: &BenchOptions, threads: usize) -> impl Iterator<Item = BenchResult> {
    let of = move |test, tokens, batch, depth| BenchResult {
        test,
        threads,
        tokens,
        batch,
        depth,
        tokens_per_second: f64::NAN,
        samples: Vec::new(),
        memory_bandwidth: f64::NAN,
    };
    let prefill = options.prefill.iter();
    let prefill = prefill.map(move |&tokens| of(BenchTest::Prefill, tokens, 1, 0));
    let decode = options.depths.iter().flat_map(move |&depth| {
        let batches = options.batches.iter();
        batches.map(move |&batch| of(BenchTest::Decode, options.decode, batch, depth))
    });
    prefill.chain(decode).filter(|test| test.tokens > 0)
}

/// Whole model, with the buffers of a step.
struct Measured<B: Backend> {
    layers: EngineOn<B>,
    head: Head,
    rows: Vec<f32>,
    logits: Vec<f32>,
}

impl<B: Backend> Measured<B> {
    /// Times of `repetitions` runs, after a warm-up run. Calls `between` before each of them, and
    /// after the last.
    fn run(
        &mut self,
        test: &BenchResult,
        repetitions: u32,
        mut between: impl FnMut(),
    ) -> Result<Vec<Duration>, Box<dyn Error>> {
        let vocab = u64::from(self.head.spec().vocab);
        let length = u64::from(test.depth) + u64::from(test.tokens);
        let seqs = (0..test.batch).map(|_| self.layers.open());
        let seqs = seqs.collect::<Result<Vec<SeqId>, _>>()?;
        // Any tokens will do, but a single repeated token would be read from the cache.
        let ids: Vec<Vec<u32>> = (0..u64::from(test.batch))
            .map(|seq| {
                let ids = seq * length..(seq + 1) * length;
                ids.map(|i| (i * 7919 % vocab) as u32).collect()
            })
            .collect();
        for (seq, ids) in seqs.iter().zip(&ids) {
            let (before, _) = ids.split_at(test.depth as usize);
            self.append(&[*seq], 0, before)?;
        }
        let mut times = Vec::new();
        let mut step = Vec::new();
        for repetition in 0..=repetitions {
            for seq in &seqs {
                self.layers.truncate(*seq, test.depth)?;
            }
            let timed = repetition > 0 || repetitions == 0;
            if timed {
                between();
            }
            let begin = Instant::now();
            match (test.test, ids.first()) {
                (BenchTest::Prefill, Some(ids)) => self.append(&seqs, test.depth, ids)?,
                _ => {
                    for position in test.depth..test.depth + test.tokens {
                        step.clear();
                        let at = ids.iter().filter_map(|ids| ids.get(position as usize));
                        step.extend(at.copied());
                        self.append(&seqs, position, &step)?;
                    }
                }
            }
            if timed {
                times.push(begin.elapsed());
            }
        }
        between();
        for seq in seqs {
            self.layers.close(seq);
        }
        Ok(times)
    }

    /// Appends equally many tokens to each sequence at the same position, and computes the logits
    /// of the last token of each. The tokens of a sequence are adjacent.
    fn append(&mut self, seqs: &[SeqId], position: u32, ids: &[u32]) -> Result<(), Box<dyn Error>> {
        if ids.is_empty() {
            return Ok(());
        }
        let spec = self.head.spec();
        let (width, values) = (spec.width as usize, spec.row_values(&(0..spec.layers)));
        let each = ids.len() / seqs.len().max(1);
        let spans = seqs.iter();
        let spans = spans.map(|&seq| Span::new(seq, position, each as u32));
        let spans: Vec<Span> = spans.collect();
        self.head.embed(ids, &mut self.rows)?;
        self.layers.forward(&spans, &mut self.rows)?;
        // Moves the rows together at the beginning.
        for seq in 0..seqs.len() {
            let last = ((seq + 1) * each - 1) * values;
            self.rows.copy_within(last..last + width, seq * width);
        }
        self.rows.truncate(seqs.len() * width);
        Ok(self.head.logits(&self.rows, &mut self.logits)?)
    }
}

/// Rows of a chunk of a prompt, as callers send them by default.
const CHUNK: u32 = 24;

/// Positions before the timed chunk of a prompt, in whole chunks: the mean over a prompt of 500 tokens.
/// Each row attends to them.
pub const PROMPT_DEPTH: u32 = 10 * CHUNK;

/// Times of an average layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerTimes {
    /// Time of a single row, at the beginning of a sequence.
    pub row: Duration,
    /// Time per row of a prompt chunk of 24 rows, in the middle of a prompt of 500 tokens.
    pub prefill_row: Duration,
}

/// Loads some layers of a model on the exact engine, and runs rows through them for about `budget`.
/// The times are those of the median run. So many bytes of other memory as `swept` are read before
/// each run, as a chat reads other weights in between.
///
/// # Errors
/// [`LoadError`], or [`EngineError`] if the engine refuses the rows.
pub fn time_layers(
    file: &ModelFile,
    layers: Range<u32>,
    options: &EngineOptions,
    budget: Duration,
    swept: u64,
) -> Result<LayerTimes, Box<dyn Error>> {
    let others = OtherMemory::new(swept);
    let count = layers.end.saturating_sub(layers.start).max(1);
    let values = file.spec().row_values(&layers);
    let options = EngineOptions {
        // As many as the measurement needs, whatever the budget.
        max_kv_bytes: u64::MAX,
        ..options.clone()
    };
    let mut engine = Engine::load(file, layers, &options, &mut |_, _| ())?;
    let seq = engine.open()?;
    let mut row: Vec<f32> = (0..values)
        .map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0)
        .collect();
    file.spec().boundary.round(&mut row);
    let mut time = |rows: u32, depth: u32| -> Result<Duration, EngineError> {
        let input = row.repeat(rows as usize);
        let mut x = input.clone();
        engine.truncate(seq, 0)?;
        for chunk in 0..depth / rows {
            x.copy_from_slice(&input);
            engine.forward(&[Span::new(seq, chunk * rows, rows)], &mut x)?;
        }
        let (begin, mut times) = (Instant::now(), Vec::new());
        while times.len() < 6 || begin.elapsed() < budget / 2 {
            let position = engine.truncate(seq, depth)?;
            x.copy_from_slice(&input);
            others.read();
            let began = Instant::now();
            engine.forward(&[Span::new(seq, position, rows)], &mut x)?;
            times.push(began.elapsed());
        }
        Ok(typical(times) / count / rows)
    };
    Ok(LayerTimes {
        row: time(1, 0)?,
        prefill_row: time(CHUNK, prompt_depth(file.spec().context))?,
    })
}

/// Positions before the timed chunk, of a model with this context: whole chunks, of which one more fits.
fn prompt_depth(context: u32) -> u32 {
    let chunks = (context / CHUNK).saturating_sub(1);
    PROMPT_DEPTH.min(chunks * CHUNK)
}

/// Median of the times of runs. The first run, which warms up, does not count.
fn typical(times: Vec<Duration>) -> Duration {
    let mut warm: Vec<Duration> = times.into_iter().skip(1).collect();
    warm.sort();
    warm.get(warm.len() / 2).copied().unwrap_or_default()
}

/// Memory that takes the place of measured weights in the processor's cache.
pub struct OtherMemory(Vec<u8>);

impl OtherMemory {
    /// Memory of so many bytes; none if the system has too little.
    pub fn new(bytes: u64) -> Self {
        let mut memory = Vec::new();
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if memory.try_reserve_exact(bytes).is_ok() {
            // Memory that was never written maps to a single page of zeros.
            memory.resize(bytes, 1);
        }
        Self(memory)
    }

    /// Reads one byte of each line of the cache.
    pub fn read(&self) {
        let lines = self.0.iter().step_by(64);
        std::hint::black_box(lines.fold(0_u8, |sum, byte| sum ^ byte));
    }
}

/// Memory of a streaming read.
struct Stream(F16Buffer);

impl Stream {
    /// More than caches hold.
    const BYTES: usize = 1 << 29;
    const PASSES: usize = 3;

    fn new() -> Result<Self, LoadError> {
        // On huge pages, as weights are.
        let memory = Arena::default().f16_buffer(Self::BYTES / size_of::<u16>());
        let mut memory = memory.map_err(|_| LoadError::OutOfMemory(Self::BYTES))?;
        // Memory that was never written maps to a single page of zeros.
        memory.fill(1);
        Ok(Self(memory))
    }

    /// Bytes per second of reading it with so many threads: the median of some passes, because new
    /// threads may share a core in the first one.
    fn read(&self, threads: usize) -> f64 {
        let words: &[u64] = bytemuck::cast_slice(&self.0);
        let passes = std::iter::repeat_with(|| {
            let begin = Instant::now();
            std::thread::scope(|scope| {
                for part in words.chunks(words.len().div_ceil(threads.max(1))) {
                    scope.spawn(|| {
                        std::hint::black_box(part.iter().fold(0, |sum, word| sum ^ word))
                    });
                }
            });
            Self::BYTES as f64 / begin.elapsed().as_secs_f64()
        });
        median(&passes.take(Self::PASSES).collect::<Vec<f64>>())
    }
}

/// Median, or the mean of the two middle samples; NaN if there are none.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match (sorted.get(middle), sorted.get(middle.wrapping_sub(1))) {
        (Some(upper), Some(lower)) if sorted.len().is_multiple_of(2) => (upper + lower) / 2.0,
        (Some(one), _) => *one,
        _ => f64::NAN,
    }
}

/// Types of the blocks' matrices, sorted by bytes, largest first.
fn weight_types(file: &ModelFile) -> Vec<String> {
    let tensors = (0..file.spec().layers).flat_map(|layer| file.layer_tensors(layer));
    let uses = type_uses(tensors.filter(|info| info.dims.len() > 1));
    uses.iter().map(|used| used.dtype.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_between_the_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_typical_run_is_the_median_without_the_first() {
        let times = |us: &[u64]| us.iter().copied().map(Duration::from_micros).collect();
        assert_eq!(typical(times(&[1, 9, 4, 5])), Duration::from_micros(5));
        assert_eq!(typical(times(&[1])), Duration::ZERO);
    }

    #[test]
    fn a_tiny_model_can_be_measured_and_the_report_survives_json() {
        let directory = tempfile::tempdir().unwrap();
        let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
        let options = BenchOptions {
            threads: vec![1, 2],
            prefill: vec![40],
            decode: 3,
            depths: vec![0, 50],
            batches: vec![1, 5],
            repetitions: 3,
            isa: Isa::Portable,
            cache: CacheDtype::F16,
        };
        let mut bench = bench_engine(&path, &options, &mut |_| ()).unwrap();
        use BenchTest::{Decode, Prefill};
        let (of_threads, rest) = bench.results.split_at(5);
        for (threads, results) in [(1, of_threads), (2, rest)] {
            let found = results.iter();
            let found = found.map(|r| (r.test, r.threads, r.tokens, r.batch, r.depth));
            let expected = [
                (Prefill, threads, 40, 1, 0),
                (Decode, threads, 3, 1, 0),
                (Decode, threads, 3, 5, 0),
                (Decode, threads, 3, 1, 50),
                (Decode, threads, 3, 5, 50),
            ];
            assert_eq!(found.collect::<Vec<_>>(), expected);
            assert!(results.iter().all(|r| r.samples.len() == 3));
            assert!(results.iter().all(|r| r.tokens_per_second > 0.0));
        }
        assert_eq!(bench.weight_types, ["Q4_1"]);
        assert_eq!(bench.engine, "canonical-1");
        // Times that decimal digits can represent.
        bench.load_seconds = 0.25;
        for result in &mut bench.results {
            result.samples = vec![100.0, 101.5, 99.75];
            result.tokens_per_second = 100.0;
            assert!(result.memory_bandwidth > 0.0);
            result.memory_bandwidth = 17.5e9;
        }
        let json = serde_json::to_string(&bench).unwrap();
        assert_eq!(serde_json::from_str::<EngineBench>(&json).unwrap(), bench);
    }

    #[test]
    fn a_chunk_is_timed_in_the_middle_of_a_prompt_of_500_tokens_if_the_context_has_room() {
        let depths = [20, 47, 48, 256, 264, 8192].map(prompt_depth);
        assert_eq!(depths, [0, 0, 24, 216, 240, 240]);
    }

    #[test]
    fn some_layers_of_a_model_can_be_timed() {
        let directory = tempfile::tempdir().unwrap();
        let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
        let file = ModelFile::open(&path).unwrap();
        let options = EngineOptions {
            threads: 1,
            ..EngineOptions::default()
        };
        let times = time_layers(&file, 1..2, &options, Duration::ZERO, 1 << 20).unwrap();
        assert!(times.row > Duration::ZERO && times.prefill_row > Duration::ZERO);
        // Its context is shorter than the prompt.
        assert!(file.spec().context < PROMPT_DEPTH + CHUNK);
        let layers = file.spec().layers;
        assert!(time_layers(&file, layers..layers + 1, &options, Duration::ZERO, 0).is_err());
    }

    #[test]
    fn a_prompt_beyond_the_context_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
        let options = BenchOptions {
            prefill: vec![257],
            ..BenchOptions::default()
        };
        let error = bench_engine(&path, &options, &mut |_| ()).unwrap_err();
        assert!(matches!(
            error.downcast_ref(),
            Some(EngineError::ContextFull { .. })
        ));
    }
}
