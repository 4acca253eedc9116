//! Benchmark of a host's layers, for measurements of this node and of the hosts of `bench mesh`.

use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use hearthnet_engine::EngineOptions;
use hearthnet_engine::bench::time_layers;
use hearthnet_files::ModelFile;
use hearthnet_platform::machine::stand_back;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// Work of the benchmark of the layers.
const BENCHMARK: Duration = Duration::from_millis(200);
/// Lowest priority.
const NICENESS: i32 = 19;
/// Weights that a benchmark runs through, where the layers suffice: more than most caches hold.
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

/// Half-open range of held layers for a benchmark, of at most `budget` bytes.
pub(crate) fn sample(file: &ModelFile, budget: u64) -> Option<Range<u32>> {
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
    (lo < end).then_some(lo..end)
}

/// Times layers in a thread of the lowest priority, which the engine's threads inherit.
pub(crate) async fn benchmark(
    file: Arc<ModelFile>,
    layers: Range<u32>,
    options: EngineOptions,
) -> Option<Times> {
    let (done, times) = oneshot::channel();
    let work = move || {
        stand_back(NICENESS);
        let timed = time_layers(&file, layers, &options, BENCHMARK);
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
    fn microseconds_are_rounded_up_and_bounded() {
        assert_eq!(whole_us(0.0), 0);
        assert_eq!(whole_us(0.2), 1);
        assert_eq!(whole_us(f64::NAN), 0);
        assert_eq!(whole_us(1e30), u32::MAX);
        assert_eq!(duration_us(Duration::from_nanos(1_001)), 2);
        assert_eq!(duration_us(Duration::MAX), u32::MAX);
    }
}
