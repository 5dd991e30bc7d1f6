//! An exported plan from Rust: `build.sh FOLDER` compiles this beside model.c, and runs it.
//!
//! The declarations are those of model.h for a plan with the name `model`.
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void}; // std::ffi has them in newer compilers only

const DIMS: usize = 8; // MODEL_DIMS
const F32: c_int = 1; // MODEL_F32

#[repr(C)]
struct Array {
    name: *const c_char,
    dtype: c_int,
    rank: c_int,
    shape: [i64; DIMS],
    data: *mut c_void,
}

#[repr(C)]
struct RawPlan {
    _private: [u8; 0],
}

extern "C" {
    fn model_create(path: *const c_char, threads: c_int, error: *mut c_char, room: usize) -> *mut RawPlan;
    fn model_destroy(plan: *mut RawPlan);
    fn model_run(plan: *mut RawPlan, inputs: *const Array, count: c_int, outputs: *mut Array) -> c_int;
    fn model_error(plan: *const RawPlan) -> *const c_char;
    fn model_input(number: c_int) -> *const Array;
    fn model_output(number: c_int) -> *const Array;
}

/// A plan with its weights; one thread at a time may run it.
struct Plan(*mut RawPlan);

impl Plan {
    fn open(path: &str, threads: i32) -> Result<Plan, String> {
        let path = CString::new(path).map_err(|e| e.to_string())?;
        let mut error = [0 as c_char; 512];
        let raw = unsafe { model_create(path.as_ptr(), threads, error.as_mut_ptr(), error.len()) };
        if raw.is_null() {
            return Err(unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned());
        }
        Ok(Plan(raw))
    }

    /// Runs a plan of one f32 input; gives the first output and its shape.
    fn run(&mut self, x: &[f32], shape: &[i64]) -> Result<(Vec<f32>, Vec<i64>), String> {
        assert_eq!(x.len() as i64, shape.iter().product::<i64>());
        let mut sizes = [0; DIMS];
        sizes[..shape.len()].copy_from_slice(shape);
        let name = unsafe { (*model_input(0)).name };
        // The plan reads its input; model.h says which inputs it writes.
        let input = Array { name, dtype: F32, rank: shape.len() as c_int, shape: sizes, data: x.as_ptr() as *mut c_void };
        let count = (0..).take_while(|&i| !unsafe { model_output(i) }.is_null()).count();
        let mut outputs: Vec<Array> = (0..count)
            .map(|_| Array { name: std::ptr::null(), dtype: 0, rank: 0, shape: [0; DIMS], data: std::ptr::null_mut() })
            .collect();
        if unsafe { model_run(self.0, &input, 1, outputs.as_mut_ptr()) } != 0 {
            return Err(unsafe { CStr::from_ptr(model_error(self.0)) }.to_string_lossy().into_owned());
        }
        let made = &outputs[0].shape[..outputs[0].rank as usize];
        let size = made.iter().product::<i64>() as usize;
        let data = unsafe { std::slice::from_raw_parts(outputs[0].data as *const f32, size) };
        Ok((data.to_vec(), made.to_vec()))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        unsafe { model_destroy(self.0) }
    }
}

fn main() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let weights = arguments.next().unwrap_or("weights.bin".into());
    let shape: Vec<i64> = arguments.map(|a| a.parse().expect("a size")).collect();
    let size = shape.iter().product::<i64>() as usize;
    let x: Vec<f32> = (0..size).map(|i| (i % 17) as f32 / 8.0 - 1.0).collect();
    let mut plan = Plan::open(&weights, 0)?;
    let (y, made) = plan.run(&x, &shape)?;
    println!("{made:?} {}", y.iter().map(|v| *v as f64).sum::<f64>());
    Ok(())
}
