//! How fast the engine is: the library side of `hearthnet bench engine`.
//!
//! The two figures are those of `llama-bench`: *prefill*, tokens per second of a prompt that is
//! run in one go, and *decode*, tokens per second when each token is run by itself, logits
//! included. What is timed is arithmetic only, not loading, tokenising or sampling.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::engine::{EngineError, EngineOptions, FullModel, LoadError};
use crate::inspect::type_uses;
use crate::kernels::{Arena, Isa};
use crate::manifest::WeightsId;
use crate::model_file::ModelFile;

/// What to measure.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BenchOptions {
    /// Numbers of threads, each measured by itself.
    pub threads: Vec<usize>,
    /// Tokens of the prompt, each number measured by itself.
    pub prefill: Vec<u32>,
    /// Tokens that are decoded; 0 leaves the measurement out.
    pub decode: u32,
    /// Positions that are in the sequence already when decoding begins, each measured by itself.
    pub depths: Vec<u32>,
    /// How often each measurement is made, after one that does not count. The median is reported.
    pub repetitions: u32,
    /// Instruction set of the kernels.
    pub isa: Isa,
}

impl Default for BenchOptions {
    /// Prefill 512, decode 64 at depth 0, five times, with one thread and with one per core.
    fn default() -> Self {
        let all = EngineOptions::default().threads;
        let mut threads = vec![1, all];
        threads.dedup();
        Self {
            threads,
            prefill: vec![512],
            decode: 64,
            depths: vec![0],
            repetitions: 5,
            isa: Isa::detect(),
        }
    }
}

/// Everything that one run of the benchmark found out.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct EngineBench {
    /// Version of this program.
    pub version: String,
    /// The processor, as the system names it; empty where it does not.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// The model file.
    pub file: PathBuf,
    /// Its architecture.
    pub architecture: String,
    /// Types of the matrices in the blocks, most bytes first.
    pub weight_types: Vec<String>,
    /// Memory of the weights, in bytes.
    pub weight_bytes: u64,
    /// Bytes of weights that a token reads when it is decoded by itself.
    pub token_bytes: u64,
    /// Seconds that loading and repacking took, with the file in the system's cache or not.
    pub load_seconds: f64,
    /// Bytes per second that this machine reads from memory, by number of threads, in the order
    /// of the options: the median of five passes over more than its caches hold.
    pub memory_bandwidth: Vec<f64>,
    /// The measurements, in the order of the options.
    pub results: Vec<BenchResult>,
}

/// One measurement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct BenchResult {
    /// What was measured.
    pub test: BenchTest,
    /// Threads that computed.
    pub threads: usize,
    /// Tokens that were timed.
    pub tokens: u32,
    /// Positions that were there before.
    pub depth: u32,
    /// Median of `samples`.
    pub tokens_per_second: f64,
    /// Tokens per second of each repetition, in the order in which they were made.
    pub samples: Vec<f64>,
}

/// Kinds of measurement.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchTest {
    /// Many tokens at once.
    Prefill,
    /// One token after the other.
    Decode,
}

/// Measures a model file. `progress` is told what is being done, in a few words.
///
/// # Errors
/// If the file is no model that can be loaded, or the engine refuses a batch: the prompt does not fit
/// the context, most likely.
pub fn bench_engine(
    path: &Path,
    options: &BenchOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<EngineBench, Box<dyn Error>> {
    let file = ModelFile::open(path)?;
    let mut bench = EngineBench {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cpu: cpu_name(),
        cores: std::thread::available_parallelism().map_or(1, usize::from),
        isa: options.isa.name().to_owned(),
        file: path.to_owned(),
        architecture: file.spec().architecture.clone(),
        weight_types: weight_types(&file),
        weight_bytes: 0,
        token_bytes: 0,
        load_seconds: 0.0,
        memory_bandwidth: Vec::new(),
        results: Vec::new(),
    };
    progress("reading memory");
    bench.memory_bandwidth = memory_bandwidth(&options.threads)?;
    // The same for all engines, and for no snapshot: hashing is not what is measured.
    let weights = Some(WeightsId([0; 32]));
    for &threads in &options.threads {
        progress(&format!("loading for {threads} threads"));
        let begin = Instant::now();
        let engine = EngineOptions {
            threads,
            isa: options.isa,
            // As many as the longest measurement needs, whatever the budget.
            max_kv_bytes: u64::MAX,
            weights,
            ..EngineOptions::default()
        };
        let mut whole = FullModel::load(&file, &engine, &mut |_, _| ())?;
        bench.load_seconds = begin.elapsed().as_secs_f64();
        bench.weight_bytes = whole.weight_bytes();
        bench.token_bytes = whole.token_bytes();
        let prefill = options.prefill.iter();
        let prefill = prefill.map(|tokens| (BenchTest::Prefill, *tokens, 0));
        let decode = options.depths.iter();
        let decode = decode.map(|depth| (BenchTest::Decode, options.decode, *depth));
        for (test, tokens, depth) in prefill.chain(decode).filter(|(_, tokens, _)| *tokens > 0) {
            progress(&format!(
                "{test:?} of {tokens} at depth {depth}, {threads} threads"
            ));
            let times = measure(&mut whole, test, tokens, depth, options.repetitions)?;
            let samples: Vec<f64> = times
                .iter()
                .map(|time| f64::from(tokens) / time.as_secs_f64())
                .collect();
            bench.results.push(BenchResult {
                test,
                threads,
                tokens,
                depth,
                tokens_per_second: median(&samples),
                samples,
            });
        }
    }
    Ok(bench)
}

/// Times of `repetitions` runs, after one that does not count unless it is the only one.
fn measure(
    whole: &mut FullModel,
    test: BenchTest,
    tokens: u32,
    depth: u32,
    repetitions: u32,
) -> Result<Vec<Duration>, EngineError> {
    let mut logits = Vec::new();
    let seq = whole.engine_mut().open()?;
    let vocab = u64::from(whole.head().spec().vocab);
    // Which tokens does not matter, but always the same one would be read from the cache.
    let ids: Vec<u32> = (0..u64::from(depth) + u64::from(tokens))
        .map(|i| (i * 7919 % vocab) as u32)
        .collect();
    let (before, timed) = ids.split_at(depth as usize);
    whole.append(seq, before, &mut logits)?;
    let mut times = Vec::new();
    for repetition in 0..=repetitions {
        whole.engine_mut().truncate(seq, depth)?;
        let begin = Instant::now();
        match test {
            BenchTest::Prefill => whole.append(seq, timed, &mut logits)?,
            BenchTest::Decode => {
                for id in timed {
                    whole.append(seq, &[*id], &mut logits)?;
                }
            }
        }
        if repetition > 0 || repetitions == 0 {
            times.push(begin.elapsed());
        }
    }
    whole.engine_mut().close(seq);
    Ok(times)
}

/// Bytes that are read per pass: more than caches hold.
const STREAM: usize = 1 << 30;
/// Passes; the median counts.
const PASSES: usize = 5;

/// Bytes per second that each number of threads reads from memory.
fn memory_bandwidth(threads: &[usize]) -> Result<Vec<f64>, LoadError> {
    // On huge pages, as weights are.
    let memory = Arena::default().halves(STREAM / size_of::<u16>());
    let mut memory = memory.map_err(|_| LoadError::OutOfMemory(STREAM))?;
    // Memory that was never written is one page of zeros.
    memory.fill(1);
    let words: &[u64] = bytemuck::cast_slice(&memory);
    let mut each = Vec::new();
    for &threads in threads {
        let pass = || {
            let begin = Instant::now();
            std::thread::scope(|scope| {
                for part in words.chunks(words.len().div_ceil(threads.max(1))) {
                    scope.spawn(|| {
                        std::hint::black_box(part.iter().fold(0, |sum, word| sum ^ word))
                    });
                }
            });
            STREAM as f64 / begin.elapsed().as_secs_f64()
        };
        let passes: Vec<f64> = std::iter::repeat_with(pass).take(PASSES).collect();
        each.push(median(&passes));
    }
    Ok(each)
}

/// The middle of some samples, or the mean of the two in the middle; NaN of none.
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

/// Types of the blocks' matrices, those with most bytes first.
fn weight_types(file: &ModelFile) -> Vec<String> {
    let tensors = (0..file.spec().layers).flat_map(|layer| file.layer_tensors(layer));
    let uses = type_uses(tensors.filter(|info| info.dims.len() > 1));
    uses.iter().map(|used| used.dtype.to_string()).collect()
}

/// The processor's name: from the processor itself where it can be asked, else from the system.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |key: &str| {
        info.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.trim() == key)
            .map(|(_, value)| value.trim().to_owned())
    };
    field("model name")
        .or_else(|| field("Model"))
        .unwrap_or_default()
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
    fn a_tiny_model_can_be_measured_and_the_report_survives_json() {
        let directory = tempfile::tempdir().unwrap();
        let path = hearthnet_testkit::TinyLlama::default().write(directory.path());
        let options = BenchOptions {
            threads: vec![1, 2],
            prefill: vec![40],
            decode: 3,
            depths: vec![0, 50],
            repetitions: 3,
            isa: Isa::Portable,
        };
        let mut bench = bench_engine(&path, &options, &mut |_| ()).unwrap();
        let found: Vec<_> = bench
            .results
            .iter()
            .map(|r| (r.test, r.threads, r.tokens, r.depth))
            .collect();
        let expected: Vec<_> = [1, 2]
            .into_iter()
            .flat_map(|threads| {
                [
                    (BenchTest::Prefill, threads, 40, 0),
                    (BenchTest::Decode, threads, 3, 0),
                    (BenchTest::Decode, threads, 3, 50),
                ]
            })
            .collect();
        assert_eq!(found, expected);
        assert!(
            bench
                .results
                .iter()
                .all(|r| r.samples.len() == 3 && r.tokens_per_second > 0.0)
        );
        assert_eq!(bench.weight_types, ["Q4_1"]);
        // Times that decimal digits can write.
        bench.load_seconds = 0.25;
        bench.memory_bandwidth = vec![17e9, 17.5e9];
        for result in &mut bench.results {
            result.samples = vec![100.0, 101.5, 99.75];
            result.tokens_per_second = 100.0;
        }
        let json = serde_json::to_string(&bench).unwrap();
        assert_eq!(serde_json::from_str::<EngineBench>(&json).unwrap(), bench);
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
