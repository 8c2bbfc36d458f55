#include <Python.h>
// Some versions define a part of the following in this header.
#if __has_include(<numpy/npy_3kcompat.h>)
#include <numpy/npy_3kcompat.h>
#endif
#ifndef NPY_PY3K
#define NPY_PY3K 1
#endif
#ifndef PyInt_Check
#define PyInt_Check PyLong_Check
#endif
#ifndef PyInt_AsLong
#define PyInt_AsLong PyLong_AsLong
#endif
#ifndef PyInt_AS_LONG
#define PyInt_AS_LONG PyLong_AsLong
#endif
#ifndef PyInt_FromLong
#define PyInt_FromLong PyLong_FromLong
#endif
#ifndef PyNumber_Int
#define PyNumber_Int PyNumber_Long
#endif
#ifndef PyString_Check
#define PyString_Check PyUnicode_Check
#endif
#ifndef PyString_FromString
#define PyString_FromString PyUnicode_FromString
#endif
#ifndef PyString_AsString
#define PyString_AsString PyUnicode_AsUTF8
#endif
