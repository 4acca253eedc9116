//! A card for tests: compiles the kernels' text with a C compiler, and runs launches of it.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use hearthnet_cuda::launch::{Arg, Launch};
use hearthnet_model::kernels::WeightType;
use tempfile::TempDir;

/// What the kernels are run on.
const CARD: &str = include_str!("card.h");

/// A compiled text of kernels.
pub(crate) struct Program {
    _directory: TempDir,
    path: PathBuf,
    kernels: Vec<Kernel>,
}

/// A kernel's name and what its parameters are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parameter {
    Buffer,
    Int,
    Float,
}

/// A process that runs launches one after another.
pub(crate) struct Card<'a> {
    program: &'a Program,
    process: Child,
    /// Of the order in which threads have their turns.
    pub(crate) seed: u32,
}

impl Program {
    /// The kernels of this crate, compiled once.
    pub(crate) fn of_this_crate() -> &'static Self {
        static PROGRAM: OnceLock<Program> = OnceLock::new();
        PROGRAM.get_or_init(|| Self::compile(hearthnet_cuda::SOURCE, &[]))
    }

    /// Compiles some kernels.
    pub(crate) fn compile(source: &str, options: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        write("card.h", CARD);
        write("kernels.cu", source);
        let kernels = kernels(source);
        let main = write("main.c", &main(&kernels));
        let path = directory.path().join("card");
        compile(&main, &path, options);
        Self {
            _directory: directory,
            path,
            kernels,
        }
    }

    pub(crate) fn card(&self) -> Card<'_> {
        let process = Command::new(&self.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Card {
            program: self,
            process,
            seed: 0,
        }
    }
}

fn compile(main: &Path, to: &Path, options: &[&str]) {
    // No contraction; behaviour that C leaves undefined ends the process.
    let status = Command::new("cc")
        .args([
            "-std=gnu11",
            "-O1",
            "-ffp-contract=off",
            "-U_FORTIFY_SOURCE",
        ])
        .args(["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"])
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
            "-Wno-unused-variable",
        ])
        .args(options)
        .arg(main)
        .arg("-o")
        .arg(to)
        .arg("-lm")
        .status()
        .expect("a C compiler, cc, is needed for the tests");
    assert!(status.success(), "the kernels do not compile as C");
}

/// The kernels of a text, those of each weight type by their names.
pub(crate) fn kernels(source: &str) -> Vec<Kernel> {
    let mut all = Vec::new();
    for text in source.split("KERNEL ").skip(1) {
        let Some((name, rest)) = text.split_once('(') else {
            continue;
        };
        let name = name.trim();
        if name.is_empty() || name.contains(char::is_whitespace) {
            continue; // the definition of the word itself
        }
        let parameters = rest.split(')').next().unwrap_or_default();
        let parameters: Vec<Parameter> = parameters
            .split(',')
            .map(
                |parameter| match parameter.trim_start_matches(['\\', ' ', '\n']) {
                    pointer if pointer.contains('*') => Parameter::Buffer,
                    float if float.starts_with("float ") => Parameter::Float,
                    int => {
                        assert!(int.starts_with("int "), "a parameter of {name}: {int}");
                        Parameter::Int
                    }
                },
            )
            .collect();
        let kernel = |name| Kernel {
            name,
            parameters: parameters.clone(),
        };
        match name.split_once("##") {
            None => all.push(kernel(name.to_owned())),
            Some((stem, _)) => all.extend(
                WeightType::ALL
                    .into_iter()
                    .filter(|ty| stem == "embed_" || (stem == "plain_") != ty.quantised())
                    .map(|ty| kernel(format!("{stem}{ty:?}"))),
            ),
        }
    }
    all
}

/// A program that calls the kernels as launches say.
fn main(kernels: &[Kernel]) -> String {
    let mut text = "#include \"card.h\"\n#include \"kernels.cu\"\n".to_owned();
    for kernel in kernels {
        let parameters = kernel.parameters.iter().enumerate();
        let arguments = parameters.map(|(i, parameter)| {
            let member = match parameter {
                Parameter::Buffer => "buffer",
                Parameter::Int => "number",
                Parameter::Float => "value",
            };
            format!("arguments[{i}].{member}")
        });
        let arguments: Vec<String> = arguments.collect();
        let name = &kernel.name;
        text += &format!(
            "static void call_{name}(void) {{ {name}({}); }}\n",
            arguments.join(", ")
        );
    }
    text += "static void launch(unsigned kernel, unsigned seed) {\n";
    text += "    static void (*const kernels[])(void) = {";
    for kernel in kernels {
        text += &format!("call_{}, ", kernel.name);
    }
    text + "};\n    run_grid(kernels[kernel], seed);\n}\n"
}

impl Card<'_> {
    /// Runs a launch over buffers, named by their place in `buffers`. The kernel sees of each what the
    /// launch says, and nothing beyond.
    #[track_caller]
    pub(crate) fn run(&mut self, launch: &Launch<usize>, buffers: &mut [Vec<u8>]) {
        let result = self.try_run(launch, buffers);
        assert!(result.is_ok(), "the card stopped at {}", launch.kernel);
    }

    /// The same; an error where the card stopped.
    pub(crate) fn try_run(
        &mut self,
        launch: &Launch<usize>,
        buffers: &mut [Vec<u8>],
    ) -> std::io::Result<()> {
        let kernels = &self.program.kernels;
        let number = kernels
            .iter()
            .position(|kernel| kernel.name == launch.kernel);
        let number = number.unwrap_or_else(|| panic!("no kernel {}", launch.kernel));
        let parameters = &kernels[number].parameters;
        assert_eq!(
            parameters.len(),
            launch.args.len(),
            "arguments of {}",
            launch.kernel
        );
        self.seed = self
            .seed
            .wrapping_mul(0x9e37_79b1)
            .wrapping_add(0x7f4a_7c15);

        let mut request = Vec::new();
        let [x, y, z] = launch.grid;
        let count = launch.args.len() as u32;
        for number in [
            number as u32,
            self.seed >> 8,
            x,
            y,
            z,
            launch.threads,
            count,
        ] {
            request.extend(number.to_ne_bytes());
        }
        let mut touched: Vec<(usize, usize, usize)> = Vec::new();
        for (place, (arg, parameter)) in launch.args.iter().zip(parameters).enumerate() {
            let (kind, wanted) = match arg {
                Arg::Int(_) => (0u32, Parameter::Int),
                Arg::Float(_) => (1, Parameter::Float),
                Arg::Null => (2, Parameter::Buffer),
                Arg::Buffer { .. } => (3, Parameter::Buffer),
            };
            assert_eq!(*parameter, wanted, "an argument of {}", launch.kernel);
            let same = |(_, buffer, bytes): &&(usize, usize, usize)| matches!(arg, Arg::Buffer { buffer: b, bytes: n } if (b, n) == (buffer, bytes));
            if let Some((first, ..)) = touched.iter().find(same) {
                request.extend([4, *first as u32].map(u32::to_ne_bytes).as_flattened());
                continue;
            }
            request.extend(kind.to_ne_bytes());
            match arg {
                Arg::Int(number) => request.extend(number.to_ne_bytes()),
                Arg::Float(value) => request.extend(value.to_bits().to_ne_bytes()),
                Arg::Null => request.extend([0; 4]),
                Arg::Buffer { buffer, bytes } => {
                    request.extend((*bytes as u32).to_ne_bytes());
                    request.extend(&buffers[*buffer][..*bytes]);
                    touched.push((place, *buffer, *bytes));
                }
            }
        }
        let input = self.process.stdin.as_mut().unwrap();
        input.write_all(&request)?;
        input.flush()?;
        let output = self.process.stdout.as_mut().unwrap();
        for (_, buffer, bytes) in touched {
            output.read_exact(&mut buffers[buffer][..bytes])?;
        }
        Ok(())
    }
}

impl Drop for Card<'_> {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}
