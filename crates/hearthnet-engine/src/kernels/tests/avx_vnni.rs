//! The AVX-VNNI kernels on CPUs without AVX-VNNI: a signal handler executes the one instruction that
//! they lack, `vpdpbusd` in its VEX encoding on 256 bits.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use hearthnet_files::blocks::WeightType;

use super::super::*;
use super::reference::{self, Fma};
use super::values::{Kind, Values, assert_same, matrix, packed_matrix, product};

/// Instructions that the handler has executed.
static EMULATED: AtomicU64 = AtomicU64::new(0);

#[test]
fn avx_vnni_kernels_agree_with_the_specification() {
    if !Isa::Avx2.usable() {
        return;
    }
    let present = is_x86_feature_detected!("avxvnni");
    if !present {
        emulate();
    }
    let kernels = Kernels { isa: Isa::AvxVnni };
    let mut values = Values(42);
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.quantised()) {
        // Several groups of rows, a panel that is not full, and quants that are unpacked once.
        for (rows, tokens) in [(40, 1), (24, 2), (16, 3), (40, 6), (40, 17)] {
            let before = EMULATED.load(Ordering::Relaxed);
            let cols = 2 * ty.inputs();
            let bytes = values.weights(ty, rows, cols, Kind::Extreme);
            let x = values.many(tokens * cols, Kind::Ordinary);
            let packed = packed_matrix(&matrix(ty, rows, cols, &bytes));
            let wanted = reference::matmul(ty, &bytes, cols, &x, Fma::Fused);
            assert_same(&format!("{ty:?}"), &product(kernels, &packed, &x), &wanted);
            let expected = if present {
                0
            } else {
                // Eight rows times four inputs each.
                rows.next_multiple_of(16) / 8 * cols / 4 * tokens
            };
            let emulated = EMULATED.load(Ordering::Relaxed) - before;
            assert_eq!(
                emulated, expected as u64,
                "{ty:?}: {rows} rows, {tokens} tokens"
            );
        }
    }
}

/// Installs the handler.
fn emulate() {
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = illegal_instruction;
    // SAFETY: the structure is plain data; the handler has the signature that SA_SIGINFO asks for.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGILL, &action, std::ptr::null_mut()),
            0
        );
    }
}

/// Executes a `vpdpbusd`. Any other instruction ends the process with SIGILL, as without a handler.
extern "C" fn illegal_instruction(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes the context of the interrupted thread, and waits for it.
    let done = unsafe { execute(&mut *context.cast::<libc::ucontext_t>()) };
    if done {
        EMULATED.fetch_add(1, Ordering::Relaxed);
    } else {
        // SAFETY: resets the handler; the instruction is then executed, and refused, again.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}

/// Offsets in the memory of an `xsave`: lower and upper halves of the registers, the set of parts
/// that are stored.
const LOWER: usize = 160;
const UPPER: usize = 576;
const STORED: usize = 512;
/// The upper halves in the set of parts.
const AVX: u8 = 1 << 2;

/// Registers in the order of their numbers in instructions.
const GENERAL: [c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Executes the instruction at the instruction pointer if it is `vpdpbusd` on 256 bits, in VEX
/// encoding (Intel's manual, volume 2).
///
/// # Safety
/// `context` is that of an interrupted thread of this process.
unsafe fn execute(context: &mut libc::ucontext_t) -> bool {
    let general = &mut context.uc_mcontext.gregs;
    let start = general[libc::REG_RIP as usize] as *const u8;
    // SAFETY: an instruction that the CPU has read; the bytes are read one after another, as it does.
    let byte = |i: usize| unsafe { *start.add(i) };
    // Three bytes of VEX: map 0F38, W 0, 256 bits, prefix 66.
    if byte(0) != 0xc4 || byte(1) & 31 != 2 || byte(2) & 0x87 != 0x05 || byte(3) != 0x50 {
        return false;
    }
    let extended = |bit: u8| usize::from(byte(1) & bit == 0) << 3;
    let (mode, low) = (byte(4) >> 6, usize::from(byte(4) & 7));
    let sum = usize::from(byte(4) >> 3 & 7) + extended(0x80);
    let unsigned = usize::from(!byte(2) >> 3 & 15);
    let of = |number: usize| general[GENERAL[number] as usize] as usize;
    let displacement = |at: usize| {
        i32::from_le_bytes([byte(at), byte(at + 1), byte(at + 2), byte(at + 3)]) as usize
    };
    let mut len = 5;
    let mut address = 0usize;
    if mode < 3 {
        let mut base = Some(low + extended(0x20));
        if low == 4 {
            let (scale, index) = (byte(5) >> 6, usize::from(byte(5) >> 3 & 7) + extended(0x40));
            base = Some(usize::from(byte(5) & 7) + extended(0x20));
            len += 1;
            if index != 4 {
                address = of(index) << scale;
            }
        }
        let no_base = mode == 0 && base.is_some_and(|base| base & 7 == 5);
        if no_base {
            base = None;
        }
        let (at, relative) = (len, no_base && low == 5);
        let moved = match mode {
            0 if !no_base => 0,
            1 => {
                len += 1;
                byte(at) as i8 as usize
            }
            _ => {
                len += 4;
                displacement(at)
            }
        };
        address = address.wrapping_add(base.map_or(0, of)).wrapping_add(moved);
        if relative {
            address = address.wrapping_add(start as usize + len);
        }
    }
    let saved = context.uc_mcontext.fpregs.cast::<u8>();
    let register = |number: usize| -> [u8; 32] {
        let mut both = [0; 32];
        // SAFETY: the kernel has saved sixteen registers of both halves; upper halves that are not
        // marked as stored are zero.
        unsafe {
            saved
                .add(LOWER + 16 * number)
                .copy_to(both.as_mut_ptr(), 16);
            if *saved.add(STORED) & AVX != 0 {
                saved
                    .add(UPPER + 16 * number)
                    .copy_to(both.as_mut_ptr().add(16), 16);
            }
        }
        both
    };
    let signed = match mode {
        3 => register(low + extended(0x20)),
        // SAFETY: the instruction reads these bytes.
        _ => unsafe { (address as *const [u8; 32]).read_unaligned() },
    };
    let (mut result, unsigned) = (register(sum), register(unsigned));
    for lane in (0..32).step_by(4) {
        let mut sum = i32::from_le_bytes([0, 1, 2, 3].map(|i| result[lane + i]));
        for i in lane..lane + 4 {
            sum = sum.wrapping_add(i32::from(unsigned[i]) * i32::from(signed[i] as i8));
        }
        result[lane..lane + 4].copy_from_slice(&sum.to_le_bytes());
    }
    // SAFETY: as in `register`; the upper halves become stored ones.
    unsafe {
        if *saved.add(STORED) & AVX == 0 {
            saved.add(UPPER).write_bytes(0, 256);
            *saved.add(STORED) |= AVX;
        }
        saved.add(LOWER + 16 * sum).copy_from(result.as_ptr(), 16);
        saved
            .add(UPPER + 16 * sum)
            .copy_from(result.as_ptr().add(16), 16);
    }
    general[libc::REG_RIP as usize] += len as i64;
    true
}
