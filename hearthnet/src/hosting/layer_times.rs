//! Benchmark of a host's layers, for measurements of this node and of the hosts of `bench mesh`.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hearthnet_engine::EngineOptions;
use hearthnet_engine::bench::time_layers;
use hearthnet_files::ModelFile;
use hearthnet_platform::hardware::cache_bytes;
use hearthnet_platform::machine::stand_back;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Work of the benchmark of the layers.
const BENCHMARK: Duration = Duration::from_millis(200);
/// Lowest priority.
const NICENESS: i32 = 19;
/// Weights that a benchmark runs through, where the layers suffice: twice what most caches hold.
const BENCHMARK_BYTES: u64 = 64 << 20;

/// Times of an average layer in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Times {
    pub(crate) layer_us: u32,
    pub(crate) prefill_row_us: u32,
    /// Number of benchmarks, of which these are the shortest times.
    #[serde(default)]
    pub(crate) runs: u32,
}

impl Times {
    /// Shorter times of two benchmarks. Other programs make a benchmark slower, and never faster.
    pub(crate) fn shorter(self, other: Self) -> Self {
        Self {
            layer_us: self.layer_us.min(other.layer_us),
            prefill_row_us: self.prefill_row_us.min(other.prefill_row_us),
            runs: self.runs.saturating_add(other.runs),
        }
    }
}

/// Layers that a benchmark runs, and the memory that it reads before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Half-open range of held layers.
    layers: Range<u32>,
    /// Bytes of other memory to read before each run.
    swept: u64,
}

/// Bytes of all held layers and of the head: those that a chat through them reads.
pub(crate) fn bytes_in_use(file: &ModelFile) -> u64 {
    let held = file.held_layers().into_iter();
    let held = held.flat_map(|(lo, hi)| lo..=hi);
    let held = held.map(|layer| file.layer_bytes(layer));
    held.fold(file.head_bytes(), u64::saturating_add)
}

/// Held layers for a benchmark that takes at most `budget` bytes of memory.
///
/// Few layers stay in a cache that all weights of a chat do not fit into. More layers would take long
/// to load. So other memory is read between the runs.
pub(crate) fn sample(file: &ModelFile, budget: u64) -> Option<Sample> {
    let longest = file
        .held_layers()
        .into_iter()
        .max_by_key(|(lo, hi)| hi - lo);
    let (lo, hi) = longest?;
    let (mut end, mut taken) = (lo, 0u64);
    while end <= hi && taken < BENCHMARK_BYTES {
        taken = taken.saturating_add(file.layer_bytes(end));
        if taken > budget {
            break;
        }
        end += 1;
    }
    let swept = swept_beside(file, taken, budget);
    (lo < end).then_some(Sample {
        layers: lo..end,
        swept,
    })
}

/// Bytes of other memory to read before each run of `measured` bytes of a model's weights, with both in
/// at most `budget` bytes of memory.
pub(crate) fn swept_beside(file: &ModelFile, measured: u64, budget: u64) -> u64 {
    let cache = cache_bytes().unwrap_or(0);
    swept(bytes_in_use(file), measured, cache, budget)
}

/// As much as a chat that reads `in_use` bytes reads beside the `measured` ones, but no more than the
/// cache holds. A virtual machine reports a cache of which it has a share only, so that also weights
/// that would fit into it may not stay there.
fn swept(in_use: u64, measured: u64, cache: u64, budget: u64) -> u64 {
    let others = in_use.saturating_sub(measured).min(cache);
    // Of twice as much as it holds, the cache keeps nothing by itself.
    let is_cached = measured < cache.saturating_mul(2);
    let fits = measured.saturating_add(others) <= budget;
    match is_cached && fits {
        true => others,
        false => 0,
    }
}

/// Times layers in a thread of the lowest priority, which the engine's threads inherit.
pub(crate) async fn benchmark(
    file: Arc<ModelFile>,
    Sample { layers, swept }: Sample,
    options: EngineOptions,
) -> Option<Times> {
    let (done, times) = oneshot::channel();
    let work = move || {
        stand_back(NICENESS);
        let timed = time_layers(&file, layers, &options, BENCHMARK, swept);
        let timed = timed.map_err(|error| error.to_string());
        // The daemon may have stopped.
        let _ = done.send(timed);
    };
    let started = thread::Builder::new().name("measure".into()).spawn(work);
    if let Err(error) = started {
        tracing::debug!(%error, "no benchmark of layers");
        return None;
    }
    match times.await.ok()? {
        Ok(times) => Some(Times {
            layer_us: duration_us(times.row).max(1),
            prefill_row_us: duration_us(times.prefill_row).max(1),
            runs: 1,
        }),
        Err(error) => {
            tracing::debug!("no benchmark of layers: {error}");
            None
        }
    }
}

/// [`whole_us`] of a duration.
pub(crate) fn duration_us(took: Duration) -> u32 {
    whole_us(took.as_secs_f64() * 1e6)
}

/// Microseconds, rounded up. (Numbers beyond the range, and NaN, become its ends.)
pub(crate) fn whole_us(us: f64) -> u32 {
    us.ceil() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_is_read_between_runs_as_a_chat_reads_up_to_the_size_of_the_cache() {
        // In use, measured, cache, budget.
        assert_eq!(swept(92, 64, 480, 8_000), 28);
        assert_eq!(swept(64, 64, 480, 8_000), 0);
        assert_eq!(swept(4_000, 70, 480, 8_000), 480);
        assert_eq!(swept(4_000, 70, 32, 8_000), 0);
        assert_eq!(swept(4_000, 70, 480, 500), 0);
        assert_eq!(swept(4_000, 70, 0, 8_000), 0);
    }

    #[test]
    fn microseconds_are_rounded_up_and_bounded() {
        assert_eq!(whole_us(0.0), 0);
        assert_eq!(whole_us(0.2), 1);
        assert_eq!(whole_us(f64::NAN), 0);
        assert_eq!(whole_us(1e30), u32::MAX);
        assert_eq!(duration_us(Duration::from_nanos(1_001)), 2);
        assert_eq!(duration_us(Duration::MAX), u32::MAX);
    }
}
