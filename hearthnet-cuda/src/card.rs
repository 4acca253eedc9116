//! Compiling the kernels, and launching them on a card. Never tried on one.

// A launch hands a kernel addresses, and looking for a library runs its initialisers; each block says why
// it is sound.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, CudaModule, CudaSlice, CudaStream, DriverError, LaunchConfig,
    PushKernelArg as _,
};
use cudarc::nvrtc::{CompileError, CompileOptions, Ptx, compile_ptx_with_opts};

use crate::SOURCE;
use crate::launch::{Arg, Launch};

/// Why something on a card failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CardError {
    /// There is no NVIDIA driver on this machine.
    #[error("no graphics card of NVIDIA can be used here: its driver (libcuda) is not installed")]
    NoDriver,
    /// There is no compiler of kernels on this machine.
    #[error(
        "NVIDIA's compiler of kernels (libnvrtc.so) is not installed; pip has it as nvidia-cuda-nvrtc"
    )]
    NoCompiler,
    /// The driver has no card of that number, or refused something.
    #[error("the driver of the graphics card refused")]
    Driver(#[from] DriverError),
    /// The kernels do not compile for an architecture.
    #[error("the kernels do not compile")]
    Compile(#[from] CompileError),
    /// The compiler's output is no text.
    #[error("what the compiler made of the kernels is no text")]
    NoText,
    /// A launch names a kernel that there is not.
    #[error("there is no kernel {0}")]
    Kernel(String),
    /// A launch needs more bytes than a buffer has.
    #[error("a launch needs {needed} bytes of a buffer of {found}")]
    Short {
        /// Bytes that the kernel may touch.
        needed: usize,
        /// Bytes that there are.
        found: usize,
    },
}

/// Compiles the kernels for an architecture (`compute_75`, `compute_80`, ...) to PTX; for the name of a
/// processor (`sm_75`, ...) the compiler goes on to its machine code.
///
/// # Errors
/// [`CardError::NoCompiler`], [`CardError::Compile`].
pub fn compile(architecture: &'static str) -> Result<String, CardError> {
    // SAFETY: loads NVIDIA's compiler as the dynamic linker finds it, which the machine's owner vouches for.
    if !unsafe { cudarc::nvrtc::sys::is_culib_present() } {
        return Err(CardError::NoCompiler);
    }
    let options = CompileOptions {
        // Subnormal numbers stay, quotients and roots are correctly rounded, nothing is contracted.
        ftz: Some(false),
        prec_div: Some(true),
        prec_sqrt: Some(true),
        fmad: Some(false),
        arch: Some(architecture),
        name: Some("hearthnet.cu".to_owned()),
        ..CompileOptions::default()
    };
    let ptx = compile_ptx_with_opts(SOURCE, options)?;
    let bytes = ptx.as_bytes().ok_or(CardError::NoText)?;
    // The image ends with a zero.
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(text.to_vec()).map_err(|_| CardError::NoText)
}

/// A card with the kernels on it. Launches run one after another.
pub struct Card {
    stream: Arc<CudaStream>,
    module: Arc<CudaModule>,
    functions: HashMap<String, CudaFunction>,
}

/// Memory of a card.
pub struct Buffer(CudaSlice<u8>);

impl Buffer {
    /// Bytes of it.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Card {
    /// The card of a number, counted from 0, with the kernels compiled for it.
    ///
    /// # Errors
    /// [`CardError::NoDriver`], [`CardError::Driver`], and those of [`compile`].
    pub fn open(ordinal: usize) -> Result<Self, CardError> {
        // SAFETY: loads NVIDIA's driver as the dynamic linker finds it, which the machine's owner vouches for.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(CardError::NoDriver);
        }
        let context = CudaContext::new(ordinal)?;
        let (major, minor) = context.compute_capability()?;
        let ptx = compile(architecture(major, minor))?;
        let module = context.load_module(Ptx::from_src(ptx))?;
        Ok(Self {
            stream: context.default_stream(),
            module,
            functions: HashMap::new(),
        })
    }

    /// Copies bytes onto the card.
    ///
    /// # Errors
    /// [`CardError::Driver`], when its memory is exhausted among others.
    pub fn upload(&self, bytes: &[u8]) -> Result<Buffer, CardError> {
        Ok(Buffer(self.stream.clone_htod(bytes)?))
    }

    /// Memory full of zeros.
    ///
    /// # Errors
    /// As [`Self::upload`].
    pub fn zeros(&self, bytes: usize) -> Result<Buffer, CardError> {
        Ok(Buffer(self.stream.alloc_zeros(bytes)?))
    }

    /// Copies a buffer from the card, after all that was launched.
    ///
    /// # Errors
    /// [`CardError::Driver`], also for what went wrong in an earlier launch.
    pub fn download(&self, buffer: &Buffer) -> Result<Vec<u8>, CardError> {
        Ok(self.stream.clone_dtoh(&buffer.0)?)
    }

    /// Launches a kernel; it runs when those before it have.
    ///
    /// # Errors
    /// [`CardError::Short`], [`CardError::Kernel`], [`CardError::Driver`].
    pub fn run(&mut self, launch: &Launch<&Buffer>) -> Result<(), CardError> {
        for arg in &launch.args {
            if let Arg::Buffer { buffer, bytes } = arg
                && *bytes > buffer.len()
            {
                return Err(CardError::Short {
                    needed: *bytes,
                    found: buffer.len(),
                });
            }
        }
        let function = match self.functions.get(&launch.kernel) {
            Some(function) => function.clone(),
            None => {
                let function = self.module.load_function(&launch.kernel);
                let function = function.map_err(|_| CardError::Kernel(launch.kernel.clone()))?;
                let kept = self
                    .functions
                    .insert(launch.kernel.clone(), function.clone());
                drop(kept);
                function
            }
        };
        const NULL: u64 = 0;
        let mut builder = self.stream.launch_builder(&function);
        for arg in &launch.args {
            match arg {
                Arg::Buffer { buffer, .. } => builder.arg(&buffer.0),
                Arg::Null => builder.arg(&NULL),
                Arg::Int(number) => builder.arg(number),
                Arg::Float(value) => builder.arg(value),
            };
        }
        let [x, y, z] = launch.grid;
        let config = LaunchConfig {
            grid_dim: (x, y, z),
            block_dim: (launch.threads, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: `launch` comes from `crate::launch`, whose arguments are those of the kernel, and the
        // kernel stays within the bytes that were checked above: `tests/kernels/exact.rs` runs the same text and the
        // same launches where one byte beyond them ends the process.
        unsafe { builder.launch(config)? };
        Ok(())
    }
}

/// What the kernels are compiled for: the newest that the card has, of those that are tested to compile.
fn architecture(major: i32, minor: i32) -> &'static str {
    match (major, minor) {
        (9.., _) => "compute_90",
        (8, _) => "compute_80",
        _ => "compute_75",
    }
}
