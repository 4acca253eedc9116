//! Opening of a card, and choice of the arithmetic of each kernel by the self-test.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::{AdapterFacts, Choice, DISPATCHES, Gpu, Kind, Shared, all_adapters, facts};
use crate::error::GpuError;
use crate::kernels::{Arithmetic, Kernel, Route, Way};
use crate::pipelines::{Compiler, PARAMETERS, Pipeline, Trial, now};
use crate::{self_test, vulkan};

/// Listing cards wakes them, which takes seconds with some drivers.
const LISTING: Duration = Duration::from_secs(20);
/// Opening a card compiles kernels, which takes longer.
const OPENING: Duration = Duration::from_secs(180);

/// Cards of this machine, in the order of their driver. Empty without a driver.
///
/// # Errors
/// [`GpuError::Hangs`].
pub fn adapters() -> Result<Vec<AdapterFacts>, GpuError> {
    in_time(LISTING, || Ok(all_facts(&all_adapters())))
}

fn all_facts(adapters: &[wgpu::Adapter]) -> Vec<AdapterFacts> {
    let numbered = adapters.iter().enumerate();
    numbered.map(|(i, adapter)| facts(i, adapter)).collect()
}

/// Result of work with a driver. A driver that hangs takes its thread with it, but not this one.
fn in_time<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> Result<T, GpuError> + Send + 'static,
) -> Result<T, GpuError> {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || {
        // The receiver is gone if this took too long.
        let _ = done.send(work());
    });
    result.recv_timeout(limit).unwrap_or(Err(GpuError::Hangs {
        seconds: limit.as_secs(),
    }))
}

impl Gpu {
    /// Opens a card and runs its self-test.
    ///
    /// # Errors
    /// Any [`GpuError`] but those of memory.
    pub fn open(choice: Choice) -> Result<Self, GpuError> {
        Self::open_altered(choice, Arithmetic::Native, |text| text)
    }

    /// For tests: with changed kernels, and without ways that rely on the card more than `most`.
    #[doc(hidden)]
    pub fn open_altered(
        choice: Choice,
        most: impl Into<Way>,
        alter: fn(String) -> String,
    ) -> Result<Self, GpuError> {
        let most = most.into();
        let found = in_time(LISTING, || Ok(all_adapters()))?;
        in_time(OPENING, move || open(&found, choice, most, alter))
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
        Ok(self.way_of(kernel)?.arithmetic)
    }

    /// For tests: arithmetic and route of a kernel.
    ///
    /// # Errors
    /// As [`Self::arithmetic_of`].
    #[doc(hidden)]
    pub fn way_of(&self, kernel: Kernel) -> Result<Way, GpuError> {
        Ok(self.pipeline(kernel)?.way)
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
        let units = matches!(kernel, Kernel::Tiles { units: true, .. });
        for way in Way::all() {
            // Matrix units need SPIR-V, also if the others are better compiled from WGSL.
            let known = match units {
                true => way.arithmetic <= self.arithmetic(),
                false => way <= self.way(),
            };
            let Some(built) = known.then(|| self.build(&family, way)).flatten() else {
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

    /// Compiles kernels; `None` if this is not possible, or the driver refuses one.
    fn build(&self, kernels: &[Kernel], way: Way) -> Option<Trial> {
        let (mut built, compiler) = (Trial::new(), &self.shared.compiler);
        for &kernel in kernels {
            if !compiler.can(kernel, way) {
                return None;
            }
            let pipeline = compiler.compile(kernel, way).ok()?;
            built.insert(kernel, Arc::new(pipeline));
        }
        Some(built)
    }
}

fn open(
    found: &[wgpu::Adapter],
    choice: Choice,
    most: Way,
    alter: fn(String) -> String,
) -> Result<Gpu, GpuError> {
    let all = all_facts(found);
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
    let descriptor = wgpu::DeviceDescriptor {
        label: None,
        required_features: wgpu::Features::empty(),
        required_limits: limits.clone(),
        // Pages and matrices are large; what is allocated beside them stays small.
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..Default::default()
    };
    let spirv = match most.route {
        Route::Spirv => vulkan::open(adapter, &descriptor),
        Route::Wgsl => None,
    };
    let opened = match spirv {
        Some((device, queue, offer)) => Some(Ok((device, queue, Some(offer)))),
        None => now(adapter.request_device(&descriptor))
            .map(|opened| opened.map(|(device, queue)| (device, queue, None))),
    };
    let (device, queue, offer) = match opened {
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
            compiler: Compiler::new(device.clone(), offer, alter),
            device,
            queue,
            pipelines: Mutex::default(),
            way: OnceLock::new(),
            without_tiles: Mutex::default(),
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
    for way in Way::all().filter(|way| *way <= most) {
        let Some(built) = gpu.build(&[Kernel::Probe], way) else {
            continue;
        };
        if self_test::passes(&gpu, Kernel::Probe, &built)? {
            gpu.shared.way.get_or_init(|| way);
            gpu.shared.pipelines.lock().extend(built);
            return Ok(gpu);
        }
    }
    Err(GpuError::SelfTest {
        card: gpu.facts().name.clone(),
        kernel: Kernel::Probe.to_string(),
    })
}
