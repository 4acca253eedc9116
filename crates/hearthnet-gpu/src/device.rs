//! Graphics cards of this machine, and one that was opened.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use parking_lot::Mutex;

use crate::buffers::Buffer;
use crate::error::GpuError;
use crate::kernels::{Arithmetic, Kernel};
use crate::pipelines::{Compiler, PARAMETERS, Pipeline, now};
use crate::self_test;
use crate::step::Step;

/// Waits for a driver end after this time. A driver's own watchdog ends a kernel within 2 to 10 s.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Opening a card compiles kernels, which takes seconds with some drivers.
const OPENING: Duration = Duration::from_secs(180);
/// Dispatches of a submission, at most; their parameters are one buffer.
pub(crate) const DISPATCHES: u32 = 4096;

/// Facts about a card, as its driver states them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterFacts {
    /// Place among the cards of this machine ([`adapters`]).
    pub index: usize,
    pub name: String,
    /// Name and version of the driver.
    pub driver: String,
    /// `vulkan`, `metal` or `dx12`.
    pub backend: String,
    pub kind: Kind,
    /// Words of the largest buffer that a kernel can use.
    pub max_binding_words: u64,
}

/// Kind of a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, strum::Display)]
#[strum(serialize_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    Discrete,
    /// Shares the processor's memory.
    Integrated,
    Virtual,
    Unknown,
    /// The processor itself: a driver in software.
    Software,
}

/// Choice of the card that [`Gpu::open`] opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A discrete card, else an integrated one; never a driver in software.
    Auto,
    /// The card of this [`AdapterFacts::index`].
    Index(usize),
    /// A driver in software, for tests.
    Software,
}

/// Cards of this machine, in the order of their driver. Empty without a driver.
pub fn adapters() -> Vec<AdapterFacts> {
    let found = all_adapters();
    found.iter().enumerate().map(|(i, a)| facts(i, a)).collect()
}

fn all_adapters() -> Vec<wgpu::Adapter> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        // Without the layers that check calls in development builds.
        flags: wgpu::InstanceFlags::empty(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let mut found = now(instance.enumerate_adapters(backends)).unwrap_or_default();
    // On Windows a card has two drivers. DirectX's may compute fma with two roundings.
    let vulkan: Vec<_> = found.iter().map(wgpu::Adapter::get_info).collect();
    let by_vulkan = |info: &wgpu::AdapterInfo| {
        let same = |v: &wgpu::AdapterInfo| (v.vendor, v.device) == (info.vendor, info.device);
        let mut vulkan = vulkan.iter().filter(|v| v.backend == wgpu::Backend::Vulkan);
        vulkan.any(same)
    };
    found.retain(|adapter| {
        let info = adapter.get_info();
        info.backend == wgpu::Backend::Vulkan || !by_vulkan(&info)
    });
    found
}

fn facts(index: usize, adapter: &wgpu::Adapter) -> AdapterFacts {
    let (info, limits) = (adapter.get_info(), adapter.limits());
    let binding = limits.max_storage_buffer_binding_size;
    AdapterFacts {
        index,
        name: info.name,
        driver: format!("{} {}", info.driver, info.driver_info)
            .trim()
            .to_owned(),
        backend: info.backend.to_string().to_lowercase(),
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => Kind::Discrete,
            wgpu::DeviceType::IntegratedGpu => Kind::Integrated,
            wgpu::DeviceType::VirtualGpu => Kind::Virtual,
            wgpu::DeviceType::Cpu => Kind::Software,
            wgpu::DeviceType::Other => Kind::Unknown,
        },
        max_binding_words: binding.min(limits.max_buffer_size) / 4,
    }
}

/// An opened card. Clones share it.
#[derive(Clone, Debug)]
pub struct Gpu {
    pub(crate) shared: Arc<Shared>,
}

#[derive(Debug)]
pub(crate) struct Shared {
    facts: AdapterFacts,
    pub(crate) device: wgpu::Device,
    pub(crate) queue: wgpu::Queue,
    pub(crate) compiler: Compiler,
    pipelines: Mutex<HashMap<Kernel, Arc<Pipeline>>>,
    /// Set once the self-test has chosen it.
    arithmetic: OnceLock<Arithmetic>,
    /// Parameters of the dispatches of a submission, [`Self::slot`] bytes apart.
    pub(crate) parameters: wgpu::Buffer,
    pub(crate) slot: u32,
    /// Bound where a kernel does not use a buffer.
    pub(crate) nothing: OnceLock<Buffer>,
    /// Number of the next buffer.
    pub(crate) next: AtomicU64,
    /// Reason of the loss.
    lost: Arc<OnceLock<GpuError>>,
    /// Held while parameters and commands of a step go to the queue.
    pub(crate) turn: Mutex<()>,
}

impl Gpu {
    /// Opens a card and runs its self-test.
    ///
    /// # Errors
    /// Any [`GpuError`] but those of memory.
    pub fn open(choice: Choice) -> Result<Self, GpuError> {
        Self::open_altered(choice, Arithmetic::Native, |text| text)
    }

    /// For tests: with changed kernels, and without arithmetics that rely on the card more than
    /// `most`.
    #[doc(hidden)]
    pub fn open_altered(
        choice: Choice,
        most: Arithmetic,
        alter: fn(String) -> String,
    ) -> Result<Self, GpuError> {
        // A driver that hangs takes its thread with it, but not this one.
        let (done, result) = mpsc::channel();
        std::thread::spawn(move || {
            // The receiver is gone if this took too long.
            let _ = done.send(open(choice, most, alter));
        });
        result.recv_timeout(OPENING).unwrap_or(Err(GpuError::Hangs {
            seconds: OPENING.as_secs(),
        }))
    }

    pub fn facts(&self) -> &AdapterFacts {
        &self.shared.facts
    }

    /// Arithmetic that the self-test has chosen. A kernel in which the card differs has one that
    /// relies on the card less.
    pub fn arithmetic(&self) -> Arithmetic {
        let chosen = self.shared.arithmetic.get();
        chosen.copied().unwrap_or(Arithmetic::Integers)
    }

    /// An empty list of operations.
    pub fn step(&self) -> Step {
        Step::new(self.clone())
    }

    /// Returns true if the card is lost. It does not come back.
    pub fn lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    /// For tests: results of a kernel's case, with the pipeline of its fastest arithmetic.
    ///
    /// # Errors
    /// As [`Self::arithmetic_of`].
    #[doc(hidden)]
    pub fn self_test(&self, kernel: Kernel) -> Result<Vec<u32>, GpuError> {
        self_test::run(self, kernel, &Trial::new())
    }

    /// For tests: arithmetic of a kernel.
    ///
    /// # Errors
    /// [`GpuError::SelfTest`], and those of a lost card.
    #[doc(hidden)]
    pub fn arithmetic_of(&self, kernel: Kernel) -> Result<Arithmetic, GpuError> {
        Ok(self.pipeline(kernel)?.arithmetic)
    }

    /// For tests: gives the card up, as if it had been removed.
    #[doc(hidden)]
    pub fn destroy(&self) {
        self.shared.device.destroy();
        self.fail(GpuError::Lost("it was given up".to_owned()));
    }

    /// # Errors
    /// The reason, if the card is lost.
    pub(crate) fn alive(&self) -> Result<(), GpuError> {
        self.shared.lost.get().map_or(Ok(()), |e| Err(e.clone()))
    }

    /// Records that the card is lost; returns the first reason.
    pub(crate) fn fail(&self, error: GpuError) -> GpuError {
        self.shared.lost.get_or_init(|| error).clone()
    }

    /// Waits until the card has done what was submitted.
    ///
    /// # Errors
    /// [`GpuError::Hangs`] and [`GpuError::Lost`].
    pub(crate) fn wait(&self, submission: Option<wgpu::SubmissionIndex>) -> Result<(), GpuError> {
        let waited = self.shared.device.poll(wgpu::PollType::Wait {
            submission_index: submission,
            timeout: Some(PATIENCE),
        });
        match waited {
            Ok(_) => self.alive(),
            Err(wgpu::PollError::Timeout) => Err(self.fail(GpuError::Hangs {
                seconds: PATIENCE.as_secs(),
            })),
            Err(error) => Err(self.fail(GpuError::Lost(error.to_string()))),
        }
    }

    /// Pipeline of a kernel in the fastest arithmetic in which the card computes the right bytes.
    ///
    /// # Errors
    /// [`GpuError::SelfTest`] if there is none, and those of a lost card.
    pub(crate) fn pipeline(&self, kernel: Kernel) -> Result<Arc<Pipeline>, GpuError> {
        if let Some(known) = self.shared.pipelines.lock().get(&kernel) {
            return Ok(Arc::clone(known));
        }
        self.alive()?;
        let family = self_test::family(kernel);
        for arithmetic in Arithmetic::FASTEST_FIRST {
            if arithmetic > self.arithmetic() {
                continue;
            }
            let Some(built) = self.build(&family, arithmetic) else {
                continue;
            };
            if self_test::passes(self, kernel, &built)? {
                let mut pipelines = self.shared.pipelines.lock();
                pipelines.extend(built);
                // The family has it.
                if let Some(pipeline) = pipelines.get(&kernel) {
                    return Ok(Arc::clone(pipeline));
                }
            }
        }
        // A driver that failed meanwhile compiles nothing.
        self.alive()?;
        Err(GpuError::SelfTest {
            card: self.facts().name.clone(),
            kernel: kernel.to_string(),
        })
    }

    /// Compiles kernels; `None` if the driver refuses one.
    fn build(&self, kernels: &[Kernel], arithmetic: Arithmetic) -> Option<Trial> {
        let mut built = Trial::new();
        for &kernel in kernels {
            let pipeline = self.shared.compiler.compile(kernel, arithmetic).ok()?;
            built.insert(kernel, Arc::new(pipeline));
        }
        Some(built)
    }
}

/// Pipelines that are being tested.
pub(crate) type Trial = HashMap<Kernel, Arc<Pipeline>>;

fn open(choice: Choice, most: Arithmetic, alter: fn(String) -> String) -> Result<Gpu, GpuError> {
    let found = all_adapters();
    let all: Vec<_> = found.iter().enumerate().map(|(i, a)| facts(i, a)).collect();
    let index = match choice {
        Choice::Index(index) if index < all.len() => index,
        Choice::Index(index) => return Err(GpuError::NotFound(index)),
        Choice::Auto | Choice::Software => {
            let software = choice == Choice::Software;
            let fitting = all
                .iter()
                .filter(|f| (f.kind == Kind::Software) == software);
            let best = fitting.min_by_key(|f| (f.kind, f.index));
            best.ok_or(GpuError::NoDriver)?.index
        }
    };
    let (adapter, facts) = (&found[index], all[index].clone());
    let limits = adapter.limits();
    let needed = [
        (
            "storage buffers",
            limits.max_storage_buffers_per_shader_stage.into(),
            6,
        ),
        (
            "bytes of workgroup memory",
            limits.max_compute_workgroup_storage_size.into(),
            16384,
        ),
        (
            "threads in a workgroup",
            limits.max_compute_invocations_per_workgroup.into(),
            256,
        ),
        ("bytes in a buffer", 4 * facts.max_binding_words, 128 << 20),
    ];
    for (limit, found, needed) in needed {
        if found < needed {
            return Err(GpuError::TooSmall {
                card: facts.name,
                limit,
                found,
                needed,
            });
        }
    }
    let opened = now(adapter.request_device(&wgpu::DeviceDescriptor {
        label: None,
        required_features: wgpu::Features::empty(),
        required_limits: limits.clone(),
        // Pages and matrices are large; what is allocated beside them stays small.
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..Default::default()
    }));
    let (device, queue) = match opened {
        Some(Ok(opened)) => opened,
        failed => {
            let reason = match failed {
                Some(Err(error)) => error.to_string(),
                _ => "the driver did not finish".to_owned(),
            };
            return Err(GpuError::Open {
                card: facts.name,
                reason,
            });
        }
    };
    let lost = Arc::new(OnceLock::new());
    let noted = Arc::clone(&lost);
    device.set_device_lost_callback(move |reason, message| {
        noted.get_or_init(|| GpuError::Lost(format!("{message} ({reason:?})")));
    });
    let noted = Arc::clone(&lost);
    device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        noted.get_or_init(|| match error {
            wgpu::Error::OutOfMemory { .. } => GpuError::OutOfMemory { bytes: 0 },
            error => GpuError::Lost(error.to_string()),
        });
    }));
    let alignment = limits.min_uniform_buffer_offset_alignment;
    let slot = alignment.max(4 * PARAMETERS as u32);
    let parameters = device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: u64::from(slot) * u64::from(DISPATCHES),
        usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let gpu = Gpu {
        shared: Arc::new(Shared {
            facts,
            compiler: Compiler::new(device.clone(), alter),
            device,
            queue,
            pipelines: Mutex::default(),
            arithmetic: OnceLock::new(),
            parameters,
            slot,
            nothing: OnceLock::new(),
            next: AtomicU64::new(0),
            lost,
            turn: Mutex::new(()),
        }),
    };
    let nothing = gpu.buffer(4)?;
    gpu.shared.nothing.get_or_init(|| nothing);
    // The float operations alone tell what the card can do.
    for arithmetic in Arithmetic::FASTEST_FIRST {
        if arithmetic > most {
            continue;
        }
        let Some(built) = gpu.build(&[Kernel::Probe], arithmetic) else {
            continue;
        };
        if self_test::passes(&gpu, Kernel::Probe, &built)? {
            gpu.shared.arithmetic.get_or_init(|| arithmetic);
            gpu.shared.pipelines.lock().extend(built);
            return Ok(gpu);
        }
    }
    Err(GpuError::SelfTest {
        card: gpu.facts().name.clone(),
        kernel: Kernel::Probe.to_string(),
    })
}
