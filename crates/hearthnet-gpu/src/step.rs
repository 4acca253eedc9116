//! Operations on the card, recorded and submitted together.

use std::ops::Range;
use std::sync::Arc;

use crate::buffers::{Buffer, View};
use crate::device::{DISPATCHES, Gpu};
use crate::error::GpuError;
use crate::kernels::Kernel;
use crate::pipelines::{PARAMETERS, Pipeline, Trial};

/// Operations of a batch, in order. Each sees the results of those before it. They begin with
/// [`Step::submit`], which keeps their buffers until they have run.
///
/// Numbers are the bits of f32 in words. Unless an operation says otherwise, its result may replace
/// an operand. A shape that does not fit panics: it is a bug of the caller.
#[derive(Debug)]
#[must_use = "nothing runs before it is submitted"]
pub struct Step {
    pub(crate) gpu: Gpu,
    commands: Vec<Command>,
    /// Parameters of the dispatches since the last submission.
    parameters: Vec<u8>,
    dispatches: u32,
    recorded: u32,
    /// Pipelines of a self-test.
    trial: Trial,
    /// The first error; nothing runs after it.
    failed: Option<GpuError>,
}

#[derive(Debug)]
enum Command {
    Dispatch {
        pipeline: Arc<Pipeline>,
        group: wgpu::BindGroup,
        offset: u32,
        groups: [u32; 3],
    },
    Copy {
        source: wgpu::Buffer,
        target: wgpu::Buffer,
        /// Bytes.
        from: u64,
        to: u64,
        len: u64,
    },
    Clear {
        buffer: wgpu::Buffer,
        bytes: Range<u64>,
    },
}

impl Gpu {
    /// An empty list of operations.
    pub fn step(&self) -> Step {
        Step::trial(self.clone(), Trial::new())
    }
}

impl Step {
    /// A step of a self-test, with pipelines that are not known yet.
    pub(crate) fn trial(gpu: Gpu, trial: Trial) -> Self {
        Self {
            gpu,
            commands: Vec::new(),
            parameters: Vec::new(),
            dispatches: 0,
            recorded: 0,
            trial,
            failed: None,
        }
    }

    /// Kernels recorded so far.
    pub fn ops(&self) -> u32 {
        self.recorded
    }

    /// Float operations on triples, eight results each; for the self-test.
    pub(crate) fn probe(&mut self, inputs: [&Buffer; 3], out: &Buffer, count: u32) {
        let [a, b, c] = inputs;
        let groups = count.div_ceil(64);
        self.dispatch(Kernel::Probe, &[a, b, c, out], &[count], [groups, 1, 1]);
    }

    /// Sets words to 0.
    pub fn clear(&mut self, buffer: &Buffer, words: Range<u64>) {
        assert!(words.end <= buffer.words(), "beyond the buffer");
        self.commands.push(Command::Clear {
            buffer: buffer.inner.buffer.clone(),
            bytes: 4 * words.start..4 * words.end,
        });
    }

    /// Copies words between buffers, or within one if the two do not overlap.
    pub fn copy_words(&mut self, source: &Buffer, at: u64, target: &Buffer, to: u64, words: u64) {
        assert!(at + words <= source.words() && to + words <= target.words());
        if source.inner.id != target.inner.id {
            self.copy_bytes(source, 4 * at, target, 4 * to, 4 * words);
            return;
        }
        // A buffer cannot be both ends of a copy.
        match self.gpu.buffer(words) {
            Ok(between) => {
                self.copy_bytes(source, 4 * at, &between, 0, 4 * words);
                self.copy_bytes(&between, 0, target, 4 * to, 4 * words);
            }
            Err(error) => self.fail(error),
        }
    }

    fn copy_bytes(&mut self, source: &Buffer, from: u64, target: &Buffer, to: u64, len: u64) {
        self.commands.push(Command::Copy {
            source: source.inner.buffer.clone(),
            target: target.inner.buffer.clone(),
            from,
            to,
            len,
        });
    }

    pub(crate) fn nothing(&mut self) -> Buffer {
        match self.gpu.shared.nothing.get() {
            Some(nothing) => nothing.clone(),
            // It is made when the card is opened.
            None => unreachable!("a card without its empty buffer"),
        }
    }

    fn fail(&mut self, error: GpuError) {
        self.failed.get_or_insert(error);
    }

    pub(crate) fn dispatch(
        &mut self,
        kernel: Kernel,
        buffers: &[&Buffer],
        parameters: &[u32],
        groups: [u32; 3],
    ) {
        if self.failed.is_some() || groups.contains(&0) {
            return;
        }
        assert!(groups.iter().all(|n| *n < 1 << 16), "too many rows at once");
        let pipeline = match self.trial.get(&kernel) {
            Some(pipeline) => Ok(Arc::clone(pipeline)),
            None => self.gpu.pipeline(kernel),
        };
        let pipeline = match pipeline {
            Ok(pipeline) => pipeline,
            Err(error) => return self.fail(error),
        };
        if self.dispatches == DISPATCHES {
            self.flush();
        }
        let shared = &self.gpu.shared;
        let group = shared
            .compiler
            .group(&pipeline, &shared.parameters, buffers);
        let mut slot = [0; PARAMETERS];
        for (slot, parameter) in slot.iter_mut().zip(parameters) {
            *slot = *parameter;
        }
        let offset = self.dispatches * shared.slot;
        self.parameters.resize(offset as usize, 0);
        self.parameters.extend(bytemuck::cast_slice(&slot));
        self.dispatches += 1;
        self.recorded += 1;
        self.commands.push(Command::Dispatch {
            pipeline,
            group,
            offset,
            groups,
        });
    }

    /// Begins the operations. Does not wait for them.
    ///
    /// # Errors
    /// Those of a lost card, or of a kernel whose self-test fails, from any operation.
    pub fn submit(mut self) -> Result<(), GpuError> {
        self.flush();
        self.failed.map_or(Ok(()), Err)
    }

    fn flush(&mut self) {
        let commands = std::mem::take(&mut self.commands);
        let parameters = std::mem::take(&mut self.parameters);
        self.dispatches = 0;
        if self.failed.is_some() || commands.is_empty() {
            return;
        }
        let shared = &self.gpu.shared;
        let mut encoder = shared
            .device
            .create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut commands = commands.iter().peekable();
        while let Some(command) = commands.next() {
            match command {
                Command::Copy {
                    source,
                    target,
                    from,
                    to,
                    len,
                } => encoder.copy_buffer_to_buffer(source, *from, target, *to, *len),
                Command::Clear { buffer, bytes } => {
                    let len = bytes.end - bytes.start;
                    encoder.clear_buffer(buffer, bytes.start, Some(len));
                }
                Command::Dispatch { .. } => {
                    // All dispatches up to the next copy are one pass.
                    let mut pass =
                        encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
                    let mut next = Some(command);
                    while let Some(Command::Dispatch {
                        pipeline,
                        group,
                        offset,
                        groups: [x, y, z],
                    }) = next
                    {
                        pass.set_pipeline(&pipeline.pipeline);
                        pass.set_bind_group(0, group, &[*offset]);
                        pass.dispatch_workgroups(*x, *y, *z);
                        next = commands.next_if(|c| matches!(c, Command::Dispatch { .. }));
                    }
                }
            }
        }
        let commands = encoder.finish();
        let turn = shared.turn.lock();
        if !parameters.is_empty() {
            let queue = &shared.queue;
            queue.write_buffer(&shared.parameters, 0, &parameters);
        }
        shared.queue.submit([commands]);
        drop(turn);
        if let Err(error) = self.gpu.alive() {
            self.fail(error);
        }
    }
}

/// Checks that rows lie in their buffer.
#[track_caller]
pub(crate) fn fits(view: View<'_>, rows: u32, cols: u32) {
    let last = u64::from(rows.max(1) - 1) * u64::from(view.stride);
    assert!(
        u64::from(view.offset) + last + u64::from(cols) <= view.buffer.words(),
        "rows beyond their buffer"
    );
}
