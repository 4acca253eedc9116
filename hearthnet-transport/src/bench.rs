//! Benchmark of a session: round trips and throughput by size, against an echo host.
//!
//! The host runs [`serve_echo`], for sessions with the purpose [`PURPOSE`]; the caller runs
//! [`run`]. The rows are noise, like most activations: zstd cannot compress them.

use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::Serialize;

use crate::{
    Connection, DType, Message, SendError, SessionClosed, SessionStats, Step, StepResult, Want,
};

/// Purpose of benchmark sessions.
pub const PURPOSE: &str = "bench";

/// Sizes and durations to measure.
#[derive(Clone, Debug)]
pub struct BenchOptions {
    /// Row block sizes in bytes for the round trips; rounded down to whole fp16 values.
    pub round_trip_bytes: Vec<u32>,
    /// Measured round trips per size.
    pub round_trips: u32,
    /// Unmeasured round trips per size, before the measured ones.
    pub warm_up: u32,
    /// Row block sizes in bytes for the throughput.
    pub throughput_bytes: Vec<u32>,
    /// Duration of each throughput measurement.
    pub throughput_time: Duration,
}

impl Default for BenchOptions {
    /// A decode row of a 0.1B and of a 7B model, a prefill chunk, a whole tensor chunk.
    fn default() -> Self {
        BenchOptions {
            round_trip_bytes: vec![1_152, 7_168, 294_912, 1_048_576],
            round_trips: 2_000,
            warm_up: 200,
            throughput_bytes: vec![1_152, 65_536, 294_912, 1_048_576, 8_388_608],
            throughput_time: Duration::from_secs(1),
        }
    }
}

#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct BenchReport {
    /// Round trips of one step and its answer of the same size.
    pub round_trips: Vec<RoundTrips>,
    /// Steps one way, with as many in flight as the host allows.
    pub throughput: Vec<Throughput>,
    /// The session's counters afterwards.
    pub session: SessionStats,
}

/// Round trips of one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RoundTrips {
    /// Bytes of rows, each way.
    pub bytes: u32,
    /// Round trips measured.
    pub count: u32,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 95th percentile, in microseconds.
    pub p95_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// Minimum, in microseconds.
    pub min_us: f64,
}

/// Throughput at one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Throughput {
    /// Bytes of rows per step.
    pub bytes: u32,
    /// Steps answered.
    pub steps: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// Millions of bytes per second.
    pub megabytes_per_second: f64,
}

/// Why a measurement ended early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A step could not be sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The session ended.
    #[error(transparent)]
    Closed(#[from] SessionClosed),
    /// The host answered with another message or other rows.
    #[error("the host does not echo: {0}")]
    NotAnEcho(&'static str),
    /// A size of zero.
    #[error("a size to measure must be at least 2 bytes")]
    Size,
}

/// Answers every step with its own rows, until the session ends.
pub async fn serve_echo(mut connection: Connection) -> SessionClosed {
    let sender = connection.sender();
    loop {
        let step = match connection.recv().await {
            Ok(Message::Step(step)) => step,
            Ok(_) => continue,
            Err(closed) => return closed,
        };
        match sender.send(Message::StepResult(echo(step))).await {
            Ok(()) | Err(SendError::Message(_)) => {}
            Err(SendError::Closed(closed)) => return closed,
        }
    }
}

/// Echo of a step: returns the rows that it wants.
pub fn echo(step: Step) -> StepResult {
    let row_bytes = step.width as usize * step.dtype.size();
    let (rows, data) = match step.want {
        Want::None => (0, Bytes::new()),
        Want::Last => (
            1,
            step.data.slice(step.data.len().saturating_sub(row_bytes)..),
        ),
        Want::All => (step.rows, step.data),
    };
    StepResult {
        stream: step.stream,
        epoch: step.epoch,
        position: step.position,
        rows,
        width: step.width,
        dtype: step.dtype,
        compute_us: 0,
        queue_us: 0,
        data,
    }
}

/// A step of `bytes` bytes of noise (xorshift64*).
fn step(bytes: u32, want: Want) -> Result<Step, BenchError> {
    let width = bytes / 2;
    if width == 0 {
        return Err(BenchError::Size);
    }
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let data: Vec<u8> = (0..width)
        .flat_map(|_| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            let [_, _, _, _, _, _, a, b] = state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes();
            [a, b]
        })
        .collect();
    Ok(Step {
        stream: 1,
        epoch: 0,
        position: 0,
        rows: 1,
        width,
        dtype: DType::F16,
        want,
        data: Bytes::from(data),
    })
}

async fn result(connection: &mut Connection) -> Result<StepResult, BenchError> {
    loop {
        match connection.recv().await? {
            Message::StepResult(result) => return Ok(result),
            // The host will end the session, and answers until then.
            Message::Leaving { .. } => {}
            _ => return Err(BenchError::NotAnEcho("another message than a result")),
        }
    }
}

/// Measures an open session whose host runs [`serve_echo`].
///
/// # Errors
/// See [`BenchError`].
pub async fn run(
    connection: &mut Connection,
    options: &BenchOptions,
) -> Result<BenchReport, BenchError> {
    let mut round_trips = Vec::new();
    for &bytes in &options.round_trip_bytes {
        round_trips.push(round_trip(connection, bytes, options).await?);
    }
    let mut throughput = Vec::new();
    for &bytes in &options.throughput_bytes {
        throughput.push(one_way(connection, bytes, options.throughput_time).await?);
    }
    Ok(BenchReport {
        round_trips,
        throughput,
        session: connection.stats(),
    })
}

async fn round_trip(
    connection: &mut Connection,
    bytes: u32,
    options: &BenchOptions,
) -> Result<RoundTrips, BenchError> {
    let sender = connection.sender();
    let step = step(bytes, Want::All)?;
    let mut times = Vec::with_capacity(options.round_trips as usize);
    for i in 0..options.warm_up.saturating_add(options.round_trips) {
        let begin = Instant::now();
        sender.send(Message::Step(step.clone())).await?;
        let result = result(connection).await?;
        let took = begin.elapsed();
        if result.data != step.data {
            return Err(BenchError::NotAnEcho("other rows than were sent"));
        }
        if i >= options.warm_up {
            times.push(took.as_nanos() as f64 / 1000.0);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(RoundTrips {
        bytes: step.width * 2,
        count: options.round_trips,
        p50_us: quantile(&times, 0.50),
        p95_us: quantile(&times, 0.95),
        p99_us: quantile(&times, 0.99),
        min_us: quantile(&times, 0.0),
    })
}

/// Value at quantile `q` of sorted values; 0 if there are none.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted
        .get((last as f64 * q).round() as usize)
        .copied()
        .unwrap_or(0.0)
}

async fn one_way(
    connection: &mut Connection,
    bytes: u32,
    time: Duration,
) -> Result<Throughput, BenchError> {
    let sender = connection.sender();
    let step = step(bytes, Want::None)?;
    let begin = Instant::now();
    // A send waits for a slot, and slots are freed by answers, which must be received: so do both
    // at once. (A dropped `send` has sent nothing.)
    let (mut sent, mut answered) = (0u64, 0u64);
    while begin.elapsed() < time || answered < sent {
        tokio::select! {
            biased;
            done = sender.send(Message::Step(step.clone())), if begin.elapsed() < time => {
                done?;
                sent += 1;
            }
            answer = result(connection), if sent > answered => {
                answer?;
                answered += 1;
            }
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let total = answered as f64 * f64::from(step.width * 2);
    Ok(Throughput {
        bytes: step.width * 2,
        steps: answered,
        seconds,
        megabytes_per_second: total / seconds / 1e6,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_sorted_values() {
        let values: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!(quantile(&values, 0.0), 0.0);
        assert_eq!(quantile(&values, 0.5), 50.0);
        assert_eq!(quantile(&values, 0.99), 99.0);
        assert_eq!(quantile(&values, 1.0), 100.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }

    #[test]
    fn the_echo_returns_what_is_wanted() {
        let step = Step {
            rows: 3,
            width: 2,
            ..step(12, Want::All).unwrap()
        };
        assert_eq!(echo(step.clone()).data, step.data);
        let last = echo(Step {
            want: Want::Last,
            ..step.clone()
        });
        assert_eq!((last.rows, &last.data[..]), (1, &step.data[8..]));
        let none = echo(Step {
            want: Want::None,
            ..step
        });
        assert_eq!((none.rows, none.data.len()), (0, 0));
    }
}
