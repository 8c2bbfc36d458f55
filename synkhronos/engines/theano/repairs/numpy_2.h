// Descriptors have public fields again, if the code need not work with NumPy 1.
#ifndef NPY_TARGET_VERSION
#define NPY_TARGET_VERSION 0x00000012
#endif
#include <Python.h>
#include <numpy/npy_common.h>
// Complex numbers have two fields, as in NumPy 1.
struct theano_npy_complex64 { npy_float32 real, imag; };
struct theano_npy_complex128 { npy_float64 real, imag; };
#define npy_complex64 theano_npy_complex64
#define npy_complex128 theano_npy_complex128
